"""Late rewards in batches: rewards that came in time, and corrections of groups trained before.

Unless ``trainer.late`` is off, a batch's file has the values that came for its members
(``delivered`` of a group's row) and ``late``: corrected groups, waiting groups and dropped rewards.
The next batch starts from that file, so a reward counts once even if tasks run again
(`libra.policy.late_rewards`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.config import RunConfig
from libra.facts import LateRewardsTaken
from libra.graph.member_rows import member_rows, wait_for
from libra.policy import Verdict, staleness_of
from libra.policy.late_rewards import Arrival, GuessWorth, Place, WaitingGroup, correction, guessed_share, settle
from libra.store.run_records import came, group_path, read_group
from libra.types import Trajectory, TrajectoryId
from libra.worker.context import WorkerContext
from libra.worker.training.batch_rows import take_late, waiting_after, waiting_row, worth_after

logger = logging.getLogger(__name__)

LATE_TAU = 50.0
"""Versions after which a late reward counts for 1/e of its difference (RAC)."""

Delivered = Mapping[TrajectoryId, float]


async def take_delivered(context: WorkerContext, batch: int, groups: Sequence[Sequence[Trajectory]]) -> Delivered:
    """Give a batch's members their late rewards, and return these; ``trainer.late=wait`` waits."""
    spec, trainer = context.spec, context.spec.config.trainer
    late = {member.trajectory_id: member for group in groups for member in group if member.late is not None}
    found = came(spec.late_dir, late)

    def missing() -> int:
        found.update(came(spec.late_dir, [trajectory for trajectory in late if trajectory not in found]))
        return len(late) - len(found)

    limit_s = trainer.late_args["wait_s"]
    if trainer.late == "wait" and len(found) < len(late):
        logger.info(
            "run %s: batch %d waits for %d of %d late rewards", spec.run, batch, len(late) - len(found), len(late)
        )
        if await wait_for(context, batch, limit_s, missing):
            logger.warning(
                "run %s: batch %d: %d of %d late rewards did not come in trainer.late_args.wait_s=%g s, the first for %s: "
                "provisional values count, and trajectories without one are left out",
                spec.run, batch, len(late) - len(found), len(late), limit_s, next(each for each in late if each not in found),
            )  # fmt: skip
    for trajectory, value in found.items():
        late[trajectory].take_late(value)
    return found


def late_facts(
    context: WorkerContext,
    batch: int,
    groups: Sequence[Sequence[Trajectory]],
    rows: Sequence[dict[str, Any]],
    found: Delivered,
) -> dict[str, Any]:
    """The fact ``late`` of a batch; empty with ``trainer.late=off``. Notes ``found`` in ``rows``.

    ``rows``: rows of corrected groups, with ``counts`` (members that no batch trained before) and
    ``delay``. ``waiting``: groups with rewards to come. ``came``: trajectories whose reward counts
    from this batch on, with its age in versions. ``dropped``: trajectories whose reward is ignored.
    ``worth``: a `GuessWorth`.
    """
    spec, trainer = context.spec, context.spec.config.trainer
    if trainer.late == "off":
        return {}
    versions = trainer.late_args["versions"]
    waited = waiting_after(spec, batch - 1)
    values = came(spec.late_dir, [TrajectoryId(*place) for group in waited for place in group.places()])
    here: dict[Place, float] = {trajectory[:3]: value for trajectory, value in values.items()}
    settled = settle(waited, batch, here, versions=versions)
    corrected, worth = _corrections(spec.config, spec.groups_dir, settled.arrivals, worth_after(spec, batch - 1))
    waiting, dropped = list(settled.waiting), list(settled.dropped)
    for members, row in zip(groups, rows, strict=True):
        given = {sample: found[m.trajectory_id] for sample, m in enumerate(members) if m.trajectory_id in found}
        if given:
            row["delivered"] = {str(sample): value for sample, value in given.items()}
        missing = tuple(sample for sample, m in enumerate(members) if m.late is not None and sample not in given)
        if not missing:
            continue
        group = WaitingGroup(row["iteration"], row["group"], batch, missing, given, worth.slope)
        if trainer.late == "correct" and row.get("over_age") != Verdict.DROP:
            waiting.append(group)
            row["advantages"] = (np.array(row["advantages"]) * _weight(np.array(row["trains"]), group)).tolist()
        else:
            dropped += group.places()
    arrived = [
        (each.group.iteration, each.group.group, s, each.delay) for each in settled.arrivals for s in each.rewards
    ]
    if settled.dropped:
        logger.warning(
            "run %s: batch %d: %d late rewards did not come within trainer.late_args.versions=%d, the first for %s; they "
            "are dropped",
            spec.run, batch, len(settled.dropped), versions, TrajectoryId(*settled.dropped[0]),
        )  # fmt: skip
    if arrived:
        logger.info("run %s: batch %d corrects for %d late rewards", spec.run, batch, len(arrived))
    context.report(
        LateRewardsTaken(
            batch=batch,
            versions=versions,
            waited=tuple((group.iteration, group.group, group.batch, *group.missing) for group in waited),
            came=tuple(sorted(here)),
            arrived=tuple(arrived),
            dropped=settled.dropped,
            on_time=len(found),
            waiting=len(waiting),
        )
    )
    if not any(any(row["trains"]) for row in rows):
        for row in corrected:  # else nothing would be in the denominators
            row["counts"] = row["trains"]
    return {
        "late": {
            "rows": corrected,
            "waiting": [waiting_row(group) for group in waiting],
            "came": [*([*trajectory[:3], 0] for trajectory in found), *map(list, arrived)],
            "dropped": [list(place) for place in dropped],
            "worth": [worth.product, worth.square],
        }
    }


def _corrections(
    config: RunConfig, groups_dir: Path, arrivals: Iterable[Arrival], worth: GuessWorth
) -> tuple[list[dict[str, Any]], GuessWorth]:
    rows, pairs = [], []
    for arrival in arrivals:
        waited = arrival.group
        path = group_path(groups_dir, waited.iteration, waited.group)
        left = tuple(sample for sample in waited.missing if sample not in arrival.rewards)
        now = replace(waited, given={**waited.given, **arrival.rewards}, missing=left)
        _, before, trained = _advantages(config, waited, path)
        row, after, trains = _advantages(config, now, path)
        if not left:
            share = guessed_share(trained, waited.missing)
            pairs.append((share * before, after - (1 - share) * before))
        before, after = _weight(trained, waited) * before, _weight(trains, now) * after
        advantages = correction(before, after, delay=arrival.delay, tau=LATE_TAU)
        first = trains & ~trained
        takes_part = first | (advantages != 0)
        if takes_part.any():
            row |= {
                "advantages": advantages.tolist(),
                "trains": takes_part.tolist(),
                "counts": first.tolist(),
                "delivered": {str(sample): value for sample, value in now.given.items()},
                "delay": arrival.delay,
            }
            rows.append(row)
    return rows, worth.after(pairs)


def _weight(trains: NDArray[np.bool_], group: WaitingGroup) -> float:
    return 1 - (1 - group.guess_weight) * guessed_share(trains, group.missing)


def _advantages(
    config: RunConfig, waited: WaitingGroup, path: Path
) -> tuple[dict[str, Any], NDArray[np.float64], NDArray[np.bool_]]:
    members = take_late(read_group(path), {"delivered": waited.given})
    (row,) = member_rows(config.trainer, [members], [path], waited.batch, staleness_of(config))
    trains = np.array(row["trains"], np.bool_)
    return row, np.where(trains, row["advantages"], 0.0), trains
