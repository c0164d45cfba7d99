"""Where a run stands, read from its directory: what `libra resume` begins from.

Invariants
----------
1. Nothing here writes. The same directory gives the same point.
2. Batches are committed in order without gaps: batch ``j`` opens only when version ``j``, the outcome of batch ``j - 1``, is
   published.
3. A group is in one of three states: consumed by a committed batch, committed and waiting, or not committed. Only the last
   kind is ever generated for, and only what its journal does not hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from libra.graph.spec import RunSpec
from libra.policy.admission import GroupId
from libra.store.batches import batch_path, read_batch, read_batch_facts
from libra.store.journal import Journal

_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)\.group")
_RECORD = re.compile(r"(?P<name>(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)-.*)\.0000\.rec")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What earlier starts of a run committed.

    Attributes
    ----------
    members : list of tuples of GroupId
        Groups of each committed batch, in order; the run goes on with batch ``len(members)``.
    committed : set of (split, iteration, group)
        Groups whose record exists, consumed or not; an evaluation's iteration is its version.
    started : dict of GroupId to int
        Groups that are not committed and have records in the journal, with the oldest version in them.
    """

    members: list[tuple[GroupId, ...]] = field(default_factory=list)
    committed: frozenset[tuple[str, int, int]] = frozenset()
    started: dict[GroupId, int] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Batches committed, and so the version of the weights the run goes on with."""
        return len(self.members)

    @property
    def consumed(self) -> frozenset[GroupId]:
        """Groups that a committed batch holds."""
        return frozenset(group for batch in self.members for group in batch)

    def left(self, iteration: int, groups: int) -> list[int]:
        """Groups of an iteration that no committed batch holds."""
        return [g for g in range(groups) if (iteration, g) not in self.consumed]


def read_point(spec: RunSpec) -> ResumePoint:
    """The point that the files of a run amount to; StoreError where one of them is torn."""
    members: list[tuple[GroupId, ...]] = []
    while batch_path(spec.batches_dir, len(members)).exists():
        rows = read_batch(spec.batches_dir, len(members))
        members.append(tuple(dict.fromkeys((tid.iteration, tid.group) for tid in rows)))
    committed = frozenset(
        (match["split"], int(match["iteration"]), int(match["group"]))
        for match in map(_GROUP.fullmatch, _names(spec.groups_dir))
        if match is not None
    )
    consumed = {group for batch in members for group in batch}
    started: dict[GroupId, int] = {}
    journal = Journal(spec.journal_dir)
    for match in map(_RECORD.fullmatch, _names(spec.journal_dir)):
        if match is None or match["split"] != "train":
            continue
        group = (int(match["iteration"]), int(match["group"]))
        if ("train", *group) in committed or group in consumed:
            continue
        for record in journal.read(match["name"]):
            if record["kind"] == "generation" and len(record["weight_versions"]):
                oldest = int(record["weight_versions"].min())
                started[group] = min(oldest, started.get(group, oldest))
    return ResumePoint(members, committed, started)


def prune_groups(spec: RunSpec, first: int, before: int) -> int:
    """Remove the group records of batches ``first`` to ``before - 1``, which no kept checkpoint needs; returns ``before``.

    They are in the store by then. What is gone already is passed over.
    """
    for batch in range(first, before):
        for row in read_batch_facts(spec.batches_dir, batch)["groups"]:
            Path(row["path"]).unlink(missing_ok=True)
    return max(first, before)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
