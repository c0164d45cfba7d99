"""Rows of groups in a batch's or wave's file: record paths, advantages, who trains, teacher scores.

Teacher scores are read when the batch or wave is made, as late rewards are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra.config.trainer import TrainerSection
from libra.errors import TrainError
from libra.facts import LateRewardsTaken
from libra.policy import StalenessPolicy, Verdict, judge
from libra.store.run_records import batch_path, read_scores, scores_path
from libra.train import GroupRewards, batch_advantages
from libra.train.own_parts import estimator_of
from libra.types import EndReason, Trajectory
from libra.worker.context import WorkerContext
from libra.worker.training.batch_numbers import NO_SIGNAL, NOT_NEEDED
from libra.worker.training.batch_rows import without_stale

logger = logging.getLogger(__name__)

POLL_S = 0.1
HEARTBEAT_S = 5.0
"""Seconds between two reports of a waiting batch, for the watchdog."""


def member_rows(
    trainer: TrainerSection, groups: list[list[Trajectory]], paths: list[Path], batch: int, staleness: StalenessPolicy
) -> list[dict[str, Any]]:
    """Each group's row in a batch's file; TrainError for an over-age group under `Verdict.WAIT`."""
    verdicts = []
    for group in groups:
        trained = (t.oldest_version for t in group if t.failure.trains and t.num_action_tokens)
        oldest = min(trained, default=batch)
        verdicts.append(judge(oldest, batch, staleness))
        if verdicts[-1] is Verdict.WAIT:
            raise TrainError(
                f"batch {batch}: a token has lag {batch - oldest}, above run.eta={staleness.eta}; no step was taken on it"
            )
    spare = _standing_by(groups, verdicts, trainer.train_prompts)
    dropped = [verdict is Verdict.DROP or index in spare for index, verdict in enumerate(verdicts)]
    advantages, trains = batch_advantages(
        [_group_rewards(*each) for each in zip(groups, dropped, strict=True)],
        estimator_of(trainer),
        normalize_std=trainer.normalize_std,
        drop_uniform_groups=trainer.drop_uniform_groups,
        drop_truncated=trainer.drop_truncated,
    )
    rows: list[dict[str, Any]] = []
    for group, path, verdict, advantage, part in zip(groups, paths, verdicts, advantages, trains, strict=True):
        tid = group[0].trajectory_id
        row: dict[str, Any] = {"iteration": tid.iteration, "group": tid.group, "path": str(path)}
        row |= {"advantages": advantage.tolist(), "trains": part.tolist()}
        if len(rows) in spare:
            row["spare"] = spare[len(rows)]
        if verdict is not Verdict.ACCEPT:
            row["over_age"] = str(verdict)
        if verdict is Verdict.MASK:
            row["from_version"] = batch - staleness.eta
            fresh = [without_stale(member, row).num_action_tokens > 0 for member in group]
            row["trains"] = [trains and some for trains, some in zip(row["trains"], fresh, strict=True)]
        rows.append(row)
    return rows


def _standing_by(groups: list[list[Trajectory]], verdicts: list[Verdict], most: int | None) -> dict[int, str]:
    found: dict[int, str] = {}
    training = 0
    if most is None:
        return found
    for index, (group, verdict) in enumerate(zip(groups, verdicts, strict=True)):
        rewards = [] if verdict is Verdict.DROP else [t.reward for t in group if t.failure.trains]
        if not rewards or min(rewards) == max(rewards):
            found[index] = NO_SIGNAL
        elif training == most:
            found[index] = NOT_NEEDED
        else:
            training += 1
    return found


def _group_rewards(group: list[Trajectory], dropped: bool) -> GroupRewards:
    return GroupRewards(
        reward=np.array([t.reward for t in group]),
        valid=np.array([t.failure.trains and not dropped for t in group]),
        num_tokens=np.array([t.num_action_tokens for t in group]),
        finished=np.array([t.end_reason is not EndReason.LENGTH for t in group]),
        greedy=np.array([t.trajectory_id.sample == 0 for t in group]),
    )


async def wait_for(context: WorkerContext, batch: int, limit_s: float, missing: Callable[[], int]) -> int:
    """Wait until nothing is ``missing`` or the batch is committed; the number still missing."""
    began_s, reported_s = time.monotonic(), -HEARTBEAT_S
    while (left := missing()) and not batch_path(context.spec.batches_dir, batch).exists():
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            return left
        if waited_s - reported_s >= HEARTBEAT_S:
            context.report(LateRewardsTaken(batch=batch, awaited=left))
            reported_s = waited_s
        await asyncio.sleep(min(POLL_S, limit_s - waited_s))
    return 0


async def with_scores(context: WorkerContext, batch: int, rows: Sequence[dict[str, Any]]) -> None:
    """Set ``taught`` in ``rows`` that the teacher has scored, after up to ``distil.wait_s``.

    If rewards do not count, trajectories without scores train nothing. No effect without a teacher.
    """
    spec, distil = context.spec, context.spec.config.distil
    if distil.teacher is None:
        return
    paths = [scores_path(spec.groups_dir / Path(row["path"]).name) for row in rows]
    wanted = [path for path, row in zip(paths, rows, strict=True) if any(row["trains"])]
    await wait_for(context, batch, distil.wait_s, lambda: sum(not path.exists() for path in wanted))
    missing = [path.stem for path in wanted if not path.exists()]
    if missing:
        logger.warning(
            "run %s: batch %d trains %s %d of %d groups that the teacher has not scored (distil.wait_s=%g), the first is %s",
            spec.run, batch, "on rewards alone for" if distil.reward_coef else "without", len(missing), len(rows), distil.wait_s,
            missing[0],
        )  # fmt: skip
    for path, row in zip(paths, rows, strict=True):
        row["taught"] = path.exists() and any(row["trains"])
        if not distil.reward_coef:
            scores = read_scores(path, len(row["trains"])) if row["taught"] else [None] * len(row["trains"])
            row["trains"] = [bool(part and score) for part, score in zip(row["trains"], scores, strict=True)]
