"""The trajectories of a batch for a training step, from the run directory or from their graders.

With ``trainer.dispatch=peer``, a worker that grades a group keeps each of its trajectories in
memory as a row, and reports its address with the group. ``batch`` adds each member's worker and
length to its facts; a training rank fetches the rows of its slice from these workers.

Invariants
----------
1. The group's record in the run directory is authoritative: it is written before its rows are
   offered, and rows that no worker serves are read from it. A lost worker costs a read, never a
   trajectory.
2. A worker keeps only the newest groups: enough for the staleness bound plus two batches.
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

    ``of_the_step`` drops filtered trajectories, adds earlier ones that late rewards correct
    (``late``), and masks tokens that are too old. Failures that do not train are included, because
    the replica counts them. ``groups_dir`` is the present directory of group records: the paths in
    ``batch`` are out of date if the run was moved.
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
    """A trajectory without the tokens that its group's ``row`` excludes from training by age."""
    if (least := row.get("from_version")) is None:
        return member
    fresh = member.weight_version >= least
    taught = None if member.taught is None else member.taught.only(fresh[member.is_action])
    return replace(member, is_action=member.is_action & fresh, taught=taught)


def take_late(members: list[Trajectory], row: Mapping[str, Any]) -> list[Trajectory]:
    """``members`` with the late rewards (``delivered``) in their group's ``row`` of a batch."""
    for sample, value in row.get("delivered", {}).items():
        members[int(sample)].take_late(value)
    return members


def late_rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of earlier groups that a batch's late rewards correct."""
    rows: list[dict[str, Any]] = facts.get("late", {}).get("rows", [])
    return rows


def waiting_after(files: RunFiles, batch: int) -> list[WaitingGroup]:
    """Groups that still wait for rewards after batch ``batch``; empty before the first batch."""
    return [
        WaitingGroup(iteration, group, trained, tuple(missing), {int(s): v for s, v in given.items()}, weight)
        for iteration, group, trained, missing, given, weight in _late_facts(files, batch).get("waiting", ())
    ]


def worth_after(files: RunFiles, batch: int) -> GuessWorth:
    """The worth of guessed rewards after batch ``batch``."""
    return GuessWorth(*_late_facts(files, batch).get("worth", ()))


def waiting_row(group: WaitingGroup) -> list[Any]:
    """A waiting group in the format that `waiting_after` reads."""
    given = {str(sample): value for sample, value in group.given.items()}
    return [group.iteration, group.group, group.batch, list(group.missing), given, group.guess_weight]


def _late_facts(files: RunFiles, batch: int) -> Mapping[str, Any]:
    late: Mapping[str, Any] = read_batch_facts(files.batches_dir, batch).get("late", {}) if batch >= 0 else {}
    return late


class RowKeeper:
    """The graded trajectories of one worker, for training ranks to fetch."""

    def __init__(self, worker: Worker, spec: RunSpec) -> None:
        self.server = RowServer(spec.secret, urlsplit(worker.address).hostname or "127.0.0.1")
        self._kept: OrderedDict[tuple[int, int], list[str]] = OrderedDict()
        self._num_kept = num_kept(spec.config)

    def keep(self, iteration: int, group: int, members: Sequence[Trajectory]) -> dict[str, Any]:
        """Offer the rows of a recorded group; returns the host and port that offer them."""
        rows = {str(member.trajectory_id): pack_trajectory(member) for member in members}
        self.server.offer(rows)
        self._kept[iteration, group] = list(rows)
        self._kept.move_to_end((iteration, group))
        while len(self._kept) > self._num_kept:
            self.server.withdraw(self._kept.popitem(last=False)[1])
        host, port = self.server.address
        return {"host": host, "port": port}

    def close(self) -> None:
        self.server.close()


def num_kept(config: RunConfig) -> int:
    return (config.run.eta + 3) * config.trainer.prompts


def keeper_of(worker: Worker, spec: RunSpec) -> RowKeeper | None:
    """The row keeper of a worker that grades, with ``trainer.dispatch=peer``; else None."""
    grades = spec.config.trainer.dispatch == "peer" and worker.state.total_resources.get(keys.GRADE)
    return RowKeeper(worker, spec) if grades else None


def lengths(members: Sequence[Trajectory]) -> list[list[int]]:
    """Per member: whether its failure trains, and its `Sample`'s tokens and actions (0 if none)."""
    found = []
    for member in members:
        where = np.flatnonzero(member.is_action)
        found.append([int(member.failure.trains), int(where[-1]) if len(where) else 0, len(where)])
    return found


class SliceFetcher:
    """Fetches one rank's rows of a batch, and counts them by source."""

    def __init__(self, batch: Mapping[str, Any], spec: RunSpec) -> None:
        self._spec = spec
        self._group_of: dict[str, tuple[dict[str, Any], int]] = {}  # its group's row, and its index in the group
        self.numbers = dict.fromkeys(FETCHED, 0)
        for row in (*batch["members"], *batch.get("late", ())):
            self._group_of |= {name: (row, index) for index, name in enumerate(row["rows"])}

    def __call__(self, rows: Sequence[str]) -> list[Trajectory]:
        """The requested trajectories, from their workers or else from the run directory."""
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
    """As `members_of` with ``of_the_step``, for a training rank, before any row is fetched."""
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
