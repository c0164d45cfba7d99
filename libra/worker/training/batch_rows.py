"""The trajectories of a batch for a step, from the run directory, or with ``trainer.dispatch=peer`` from their graders.

A worker that grades a group keeps its trajectories in memory, a row each, and reports its address
with the group. ``batch`` adds each member's holder and length to its facts. A training rank
requests the rows of its slice there.

Invariants
----------
1. The group's record in the run directory stays authoritative: it is written before its rows are
   offered, and a row that no worker serves is read from there. A lost worker costs a read, never a
   trajectory.
2. A worker keeps only the newest groups: as many as the staleness bound allows, and two more
   batches.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from libra import keys
from libra.config import RunConfig
from libra.errors import StoreError, TransferError
from libra.policy.late_rewards import GuessWorth, WaitingGroup
from libra.store.run_records import (
    pack_trajectory,
    read_batch_facts,
    read_group,
    read_scores,
    scores_path,
    unpack_trajectory,
)
from libra.transport import Address
from libra.transport.rows import RowServer, fetch_rows
from libra.types import Trajectory
from libra.worker.run_spec import RunFiles, RunSpec

if TYPE_CHECKING:
    from distributed import Worker

    from libra.train.samples import LazyBatch

logger = logging.getLogger(__name__)

FETCHED = ("fetched_rows", "fetched_bytes", "stored_rows")
"""Numbers of a step: rows from other workers, their bytes, and rows from the run directory."""


def members_of(batch: Mapping[str, Any], groups_dir: Path, *, of_the_step: bool = False) -> list[Trajectory]:
    """All trajectories of a committed batch, with their advantages and late rewards.

    ``of_the_step`` leaves out filtered trajectories, adds earlier ones that late rewards correct
    (``late``), and makes tokens that are too old no actions. Failures that do not train are included:
    the replica counts them itself. ``groups_dir`` has the group records now; a batch records their old
    path, and a run may be moved.
    """
    trajectories = []
    for row in batch["members"]:
        path = groups_dir / Path(row["path"]).name
        members = take_late(read_group(path), row)
        if row.get("taught"):
            for member, taught in zip(members, read_scores(scores_path(path), len(members)), strict=True):
                member.taught = taught
        for member, advantage, trains in zip(members, row["advantages"], row["trains"], strict=True):
            member.advantage = advantage
            if trains or not (of_the_step and member.failure.trains):
                trajectories.append(without_stale(member, row) if of_the_step else member)
    for row in batch.get("late", ()) if of_the_step else ():
        members = take_late(read_group(groups_dir / Path(row["path"]).name), row)
        for number, member in enumerate(members):
            if row["trains"][number]:
                member.advantage, member.counted = row["advantages"][number], row["counts"][number]
                trajectories.append(without_stale(member, row))
    return trajectories


def without_stale(member: Trajectory, row: Mapping[str, Any]) -> Trajectory:
    """A trajectory as it trains: its group's row may exclude tokens of versions before ``from_version``."""
    if (least := row.get("from_version")) is None:
        return member
    fresh = member.weight_version >= least
    taught = None if member.taught is None else member.taught.only(fresh[member.is_action])
    return replace(member, is_action=member.is_action & fresh, taught=taught)


def take_late(members: list[Trajectory], row: Mapping[str, Any]) -> list[Trajectory]:
    """``members`` of a group with the late rewards (``delivered``) of its ``row`` of a batch."""
    for sample, value in row.get("delivered", {}).items():
        members[int(sample)].take_late(value)
    return members


def late_rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of groups of earlier batches that the late rewards of a batch correct, by its facts."""
    rows: list[dict[str, Any]] = facts.get("late", {}).get("rows", [])
    return rows


def waiting_after(files: RunFiles, batch: int) -> list[WaitingGroup]:
    """The groups that batch ``batch`` left with rewards to come; none for a batch before the first."""
    return [
        WaitingGroup(iteration, group, trained, tuple(missing), {int(s): v for s, v in given.items()}, weight)
        for iteration, group, trained, missing, given, weight in _late_facts(files, batch).get("waiting", ())
    ]


def worth_after(files: RunFiles, batch: int) -> GuessWorth:
    """The worth of guesses by batch ``batch``."""
    return GuessWorth(*_late_facts(files, batch).get("worth", ()))


def waiting_row(group: WaitingGroup) -> list[Any]:
    """A group as `waiting_after` reads it."""
    given = {str(sample): value for sample, value in group.given.items()}
    return [group.iteration, group.group, group.batch, list(group.missing), given, group.guess_weight]


def _late_facts(files: RunFiles, batch: int) -> Mapping[str, Any]:
    late: Mapping[str, Any] = read_batch_facts(files.batches_dir, batch).get("late", {}) if batch >= 0 else {}
    return late


class RowKeeper:
    """The trajectories that one worker graded, for training ranks to fetch."""

    def __init__(self, worker: Worker, spec: RunSpec) -> None:
        self.server = RowServer(spec.secret, urlsplit(worker.address).hostname or "127.0.0.1")
        self._kept: OrderedDict[tuple[int, int], list[str]] = OrderedDict()
        self._num_kept = num_kept(spec.config)

    def keep(self, iteration: int, group: int, members: Sequence[Trajectory]) -> dict[str, Any]:
        """Offer a recorded group; returns the block of the group's report: where its rows are."""
        rows = {str(member.trajectory_id): pack_trajectory(member) for member in members}
        self.server.offer(rows)
        self._kept[iteration, group] = list(rows)
        self._kept.move_to_end((iteration, group))
        while len(self._kept) > self._num_kept:
            self.server.withdraw(self._kept.popitem(last=False)[1])
        host, port = self.server.address
        return {"host": host, "port": port}

    def close(self) -> None:
        """Stop offering rows."""
        self.server.close()


def num_kept(config: RunConfig) -> int:
    """Number of groups whose rows a worker keeps."""
    return (config.run.eta + 3) * config.trainer.prompts


def keeper_of(worker: Worker, spec: RunSpec) -> RowKeeper | None:
    """For a worker that grades groups, if the run's ``trainer.dispatch`` is "peer"."""
    grades = spec.config.trainer.dispatch == "peer" and worker.state.total_resources.get(keys.GRADE)
    return RowKeeper(worker, spec) if grades else None


def lengths(members: Sequence[Trajectory]) -> list[list[int]]:
    """For each member: whether its failure class trains, and tokens and actions of its `Sample`; both are 0 without one."""
    found = []
    for member in members:
        where = np.flatnonzero(member.is_action)
        found.append([int(member.failure.trains), int(where[-1]) if len(where) else 0, len(where)])
    return found


class SliceFetcher:
    """Rows of one batch for one rank, with counts by source."""

    def __init__(self, batch: Mapping[str, Any], spec: RunSpec) -> None:
        self._spec = spec
        self._group_of: dict[str, tuple[dict[str, Any], int]] = {}  # the row of its group, and its place in the group
        self.numbers = dict.fromkeys(FETCHED, 0)
        for row in (*batch["members"], *batch.get("late", ())):
            self._group_of |= {name: (row, index) for index, name in enumerate(row["rows"])}

    def __call__(self, rows: Sequence[str]) -> list[Trajectory]:
        """The requested trajectories, from their holders or else from the run directory."""
        wanted: dict[Address, list[str]] = {}
        for name in rows:
            if (block := self._group_of[name][0]["block"]) is not None:
                wanted.setdefault((block["host"], block["port"]), []).append(name)
        fetched = fetch_rows(wanted, self._spec.secret)
        for address, error in fetched.failed.items():
            logger.warning("run %s: %s:%d: %s; the run directory has its rows", self._spec.run, *address, error)
        self.numbers["fetched_rows"] += len(fetched.rows)
        self.numbers["fetched_bytes"] += fetched.num_bytes
        scores_of, found = lru_cache(read_scores), []
        for name in rows:
            row, index = self._group_of[name]
            path, data = self._spec.groups_dir / Path(row["path"]).name, fetched.rows.get(name)
            member = self._stored(name, path, index) if data is None else unpack_trajectory(bytes(data), source=name)
            if row.get("taught"):
                member.taught = scores_of(scores_path(path))[index]
            found.append(without_stale(member, row))
        return found

    def _stored(self, name: str, path: Path, index: int) -> Trajectory:
        self.numbers["stored_rows"] += 1
        try:
            return read_group(path)[index]
        except StoreError as error:
            raise TransferError(f"trajectory {name} could neither be fetched nor read: {error}") from error


def lazy_batch(batch: Mapping[str, Any], fetcher: SliceFetcher) -> LazyBatch:
    """The batch of a step for a training rank, with no row fetched yet; as `members_of` with ``of_the_step``."""
    from libra.train.samples import LazyBatch, RowFacts

    facts, num_trajectories = [], 0
    for row in batch["members"]:
        members = zip(row["rows"], row["lengths"], row["advantages"], row["trains"], strict=True)
        for name, (sound, num_tokens, num_actions), advantage, trains in members:
            num_trajectories += bool(trains or not sound)  # others are filtered
            if sound and trains and num_actions:
                facts.append(RowFacts(name, num_tokens, num_actions, advantage))
    for row in batch.get("late", ()):
        late = zip(row["rows"], row["lengths"], row["advantages"], row["trains"], row["counts"], strict=True)
        for name, (_, num_tokens, num_actions), advantage, trains, counts in late:
            num_trajectories += trains
            if trains and num_actions:
                facts.append(RowFacts(name, num_tokens, num_actions, advantage, counts))
    return LazyBatch(facts, num_trajectories, fetcher)
