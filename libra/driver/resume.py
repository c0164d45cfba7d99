"""The state that earlier starts of a run committed, read from its directory for `libra resume`.

Invariants
----------
1. Only `prune_groups` writes. The same directory gives the same point.
2. Batches are committed in order without gaps: batch ``j`` opens only when step ``j - 1`` has ended, whose version may be being
   published.
3. A group is consumed by a committed batch, committed and waiting, or not committed. Only a group that is not committed is
   generated for, and only what its journal lacks.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from libra.driver.start_records import GIVEN_FILE, read_given
from libra.errors import ConfigError, RunDirectoryError, StoreError
from libra.facts import from_dict
from libra.graph.iteration import ResumePoint, Score
from libra.orderings import ordering_of
from libra.policy.log_replay import learned
from libra.policy.waves import GroupId
from libra.store.event_log import from_last_snapshot
from libra.store.quantum_records import GenerationRecord
from libra.store.run_records import (
    batch_path,
    group_path,
    groups_of,
    read_batch,
    read_batch_facts,
    read_group,
    read_waves,
    scores_path,
)
from libra.store.trajectory_journal import Journal
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_rows import waiting_after

if TYPE_CHECKING:
    from libra.envs import Environment

logger = logging.getLogger(__name__)

_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)\.group")
_RECORD = re.compile(r"(?P<name>(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)-.*)\.0000\.rec")


def read_point(spec: RunSpec) -> ResumePoint:
    """The state that the files of a run record; StoreError if one of them is torn."""
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
    waves = [groups_of(rows) for rows in read_waves(spec.waves_dir, len(members))]
    started: dict[GroupId, int] = {}
    journal = Journal(spec.journal_dir)
    for match in map(_RECORD.fullmatch, _names(spec.journal_dir)):
        if match is None or match["split"] != "train":
            continue
        group = (int(match["iteration"]), int(match["group"]))
        if ("train", *group) in committed or group in consumed:
            continue
        for record in journal.read(match["name"]):
            if isinstance(record, GenerationRecord) and len(record.weight_versions):
                oldest = int(record.weight_versions.min())
                started[group] = min(oldest, started.get(group, oldest))
    for split, iteration, number in sorted(committed):
        if split == "train" and (iteration, number) not in consumed:
            trajectories = read_group(group_path(spec.groups_dir, iteration, number))
            versions = [each.oldest_version for each in trajectories if each.num_action_tokens]
            started[iteration, number] = min(versions, default=iteration - spec.config.run.eta)
    return ResumePoint(members, committed, started, waves)


def prune_groups(spec: RunSpec, first: int, before: int) -> int:
    """Remove the group records of batches ``first`` to ``before - 1``, which no kept checkpoint needs; returns ``before``.

    Records of older evaluations and waves go with them. All are in the store by then; a missing one is ignored.
    Records of groups that wait for late rewards are kept as long as they wait.
    """
    done = {
        (row["iteration"], row["group"])
        for batch in range(first, before)
        for row in read_batch_facts(spec.batches_dir, batch)["groups"]
    }
    if first < before and spec.config.trainer.late == "correct":
        done |= {(group.iteration, group.group) for group in waiting_after(spec, first - 1)}
        done -= {(group.iteration, group.group) for group in waiting_after(spec, before - 1)}
    for group in done:
        path = group_path(spec.groups_dir, *group)
        path.unlink(missing_ok=True)
        scores_path(path).unlink(missing_ok=True)
    for path in spec.waves_dir.glob("wave-*.json"):
        if int(path.name.split("-")[1]) < before:
            path.unlink(missing_ok=True)
    for path in spec.groups_dir.glob("eval-*.group"):
        if int(path.name.split("-")[1]) < before:
            path.unlink(missing_ok=True)
    return max(first, before)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def check_resumable(directory: Path, environment: Environment | None, score: Score | None) -> None:
    """RunDirectoryError without a run, ConfigError if it was started with Python objects that are missing now."""
    if not (directory / GIVEN_FILE).is_file():
        raise RunDirectoryError(f"{directory}: no run to resume here; type the directory of a run, such as runs/NAME")
    given = read_given(directory)
    for name, now in (("environment", environment), ("score", score)):
        if given[name] != (now is not None):
            was, is_now = ("with", "without") if given[name] else ("without", "with")
            raise ConfigError(
                f"{directory}: this run was begun {was} an object as its {name}, and would continue {is_now} one; resume it "
                f"where it was begun, with libra.train(..., run__name={directory.name!r}, resume=True) and the same arguments"
            )


def learned_before(directory: Path) -> str | None:
    """The learned state of a run's policy at the end of its event log, as JSON; None if empty or unreadable.

    It is read from the last snapshot and the events after it. Without it the policy learns again.
    """
    log = directory / "events.jsonl"
    try:
        reader = from_last_snapshot(log) if log.exists() else None
        facts = ((line, from_dict(values).fact) for line, values in reader or ())
        order = learned(facts, ordering_of) if reader is not None else None
    except StoreError as error:
        logger.warning("%s: what its policy had learned is unreadable, and it learns again: %s", directory, error)
        return None
    return None if order is None else json.dumps(order)
