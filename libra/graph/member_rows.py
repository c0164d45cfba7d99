"""The rows of groups in the file of a batch or wave: where their records are, their advantages, and who trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libra.config.trainer import TrainerSection
from libra.errors import TrainError
from libra.policy import StalenessPolicy, Verdict, judge
from libra.train import GroupRewards, batch_advantages
from libra.train.own_parts import estimator_of
from libra.types import EndReason, Trajectory
from libra.worker.training.batch_rows import without_stale

NO_SIGNAL, NOT_NEEDED = "no signal", "not needed"
"""Why a group stands by."""


def member_rows(
    trainer: TrainerSection, groups: list[list[Trajectory]], paths: list[Path], batch: int, staleness: StalenessPolicy
) -> list[dict[str, Any]]:
    """The row of each group in the file of a batch; TrainError for a group over age that should have been waited for."""
    verdicts = [judge(oldest_version(group, batch), batch, staleness) for group in groups]
    for group, verdict in zip(groups, verdicts, strict=True):
        if verdict is Verdict.WAIT:
            lag = batch - oldest_version(group, batch)
            raise TrainError(
                f"batch {batch}: a token has lag {lag}, above run.eta={staleness.eta}; no step was taken on it"
            )
    spare = standing_by(groups, verdicts, trainer.train_prompts)
    left_out = [Verdict.DROP if index in spare else verdict for index, verdict in enumerate(verdicts)]
    advantages, trains = batch_advantages(
        [group_rewards(group, verdict) for group, verdict in zip(groups, left_out, strict=True)],
        estimator_of(trainer),
        normalize_std=trainer.normalize_std,
        drop_uniform_groups=trainer.drop_uniform_groups,
        drop_truncated=trainer.drop_truncated,
    )
    rows: list[dict[str, Any]] = []
    for group, path, verdict, advantage, part in zip(groups, paths, verdicts, advantages, trains, strict=True):
        row: dict[str, Any] = {
            "iteration": group[0].trajectory_id.iteration,
            "group": group[0].trajectory_id.group,
            "path": str(path),
            "advantages": advantage.tolist(),
            "trains": part.tolist(),
        }
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


def standing_by(groups: list[list[Trajectory]], verdicts: list[Verdict], most: int | None) -> dict[int, str]:
    """Groups that do not train because of ``trainer.train_prompts``, by index, and why: "no signal" or "not needed"."""
    found: dict[int, str] = {}
    if most is None:
        return found
    training = 0
    for index, (group, verdict) in enumerate(zip(groups, verdicts, strict=True)):
        rewards = [] if verdict is Verdict.DROP else [t.reward for t in group if t.failure.trains]
        if not rewards or min(rewards) == max(rewards):
            found[index] = NO_SIGNAL
        elif training == most:
            found[index] = NOT_NEEDED
        else:
            training += 1
    return found


def spare_numbers(rows: list[dict[str, Any]], most: int | None) -> dict[str, int]:
    """Metrics of ``trainer.train_prompts``, by the rows of a batch; none without it."""
    if most is None:
        return {}
    reasons = [row.get("spare") for row in rows]
    return {
        "groups_trained": reasons.count(None),
        "groups_replaced": sum(reason is None for reason in reasons[most:]),
        "groups_spare": reasons.count(NOT_NEEDED),
    }


def oldest_version(group: list[Trajectory], batch: int) -> int:
    """Version of the oldest token of a group that may train; ``batch``, the version of the step, without one."""
    return min((t.oldest_version for t in group if t.failure.trains and t.num_action_tokens), default=batch)


def group_rewards(group: list[Trajectory], verdict: Verdict = Verdict.ACCEPT) -> GroupRewards:
    """The input of the advantages; a group that is dropped has no valid member."""
    return GroupRewards(
        reward=np.array([t.reward for t in group]),
        valid=np.array([t.failure.trains and verdict is not Verdict.DROP for t in group]),
        num_tokens=np.array([t.num_action_tokens for t in group]),
        finished=np.array([t.end_reason is not EndReason.LENGTH for t in group]),
        greedy=np.array([t.trajectory_id.sample == 0 for t in group]),
    )
