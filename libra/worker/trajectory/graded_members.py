"""Grades a trajectory: sets its reward, or its failure class if grading failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra.envs import Environment, run_grader
from libra.envs.grader import bounded_reward, plain_number
from libra.envs.retries import BackOff
from libra.errors import (
    ContextOverflow,
    EngineError,
    EnvironmentFault,
    RewardFault,
    RewardTimeout,
    SessionLost,
    ToolFault,
    ToolTimeout,
)
from libra.types import Episode, FailureClass, Late, Trajectory
from libra.untrusted import repr_text

GRADE_TIMEOUT_S = 60.0


def score_fault(numbers: Any, num: int) -> str | None:
    """The fault in a score node's result for ``num`` episodes; None if it has an entry for each."""
    listed = hasattr(numbers, "__len__") and hasattr(numbers, "__getitem__")
    if isinstance(numbers, str | bytes | Mapping) or not listed:
        got = f"{repr_text(numbers)[:60]} ({type(numbers).__name__})"
        return f"score: its node gave {got} for {num} episodes, not a list of numbers"
    if len(numbers) != num:
        return f"score: its node gave {len(numbers)} numbers for {num} episodes"
    return None


async def grade(
    environment: Environment,
    resample: int,
    member: Trajectory,
    episode: Episode,
    extra: Sequence[float] | None = None,
    index: int = 0,
    *,
    late: str = "off",
    back_off: BackOff | None = None,
) -> None:
    """Set ``member``'s reward, or its failure class.

    A failed grader is retried ``resample`` times on the same trajectory: replacing the trajectory
    would bias the sample. ``extra[index]`` is added to the environment's reward. ``late`` is
    ``trainer.late``, "off" for a held-out question; ``back_off`` retries calls that an API
    temporarily refuses.
    """
    if not member.failure.trains:
        return
    failed = [member.retried] if member.retried else []
    for left in reversed(range(resample + 1)):
        try:
            reward = await run_grader(environment, episode, GRADE_TIMEOUT_S, back_off)
            _take(reward if extra is None else _with_extra(reward, extra[index], member), member, late)
            break
        except RewardFault as error:
            failure = failure_of(error)
            if left:
                failed.append(str(failure))
            else:
                member.failure, member.failure_detail, member.reward = failure, str(error)[:2000], float("nan")
    member.retried = ",".join(failed)


NOT_YET = "its reward is late, without a provisional value (libra.Late(fast=None)), and has not been delivered"
"""Detail of the failure of a trajectory that has no reward until one is delivered."""


def _take(reward: float | Late, member: Trajectory, late: str) -> None:
    if not isinstance(reward, Late):
        member.reward = reward
        return
    provisional, is_eval = reward.provisional, member.trajectory_id.split == "eval"
    if is_eval and provisional is None:
        raise RewardFault(
            f"{member.trajectory_id}: an evaluation waits for no late reward; return libra.Late(fast=NUMBER)"
        )
    if not is_eval:
        if late == "off":
            raise RewardFault(
                f"{member.trajectory_id}: the reward is libra.Late, and trainer.late=off; type trainer.late=correct, wait or drop"
            )
        member.late = [float(reward.offset), float(reward.factor)]
    if provisional is None:
        member.failure, member.failure_detail, member.reward = FailureClass.REWARD, NOT_YET, float("nan")
    else:
        member.reward = provisional


def _with_extra(reward: float | Late, more: float, member: Trajectory) -> float | Late:
    try:
        total = reward + float(plain_number(more))
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFault(
            f"{member.trajectory_id}: the reward node returned {repr_text(more)}; it must be a finite number"
        ) from error
    where = f"{member.trajectory_id}, with the number of the reward node"
    return total if isinstance(total, Late) else bounded_reward(total, where)


_CLASSES: tuple[tuple[type[Exception], FailureClass], ...] = (
    (RewardTimeout, FailureClass.TIMEOUT),
    (RewardFault, FailureClass.REWARD),
    (ToolTimeout, FailureClass.TIMEOUT),
    (ToolFault, FailureClass.TOOL),
    (SessionLost, FailureClass.WORKER),
    (EnvironmentFault, FailureClass.ENVIRONMENT),
    (ContextOverflow, FailureClass.ENVIRONMENT),  # a trajectory ends before it overflows, so this prompt never fitted
    (EngineError, FailureClass.ENGINE),
)
"""The first match counts, so a subclass is listed before its base."""

FAULTS = (EngineError, EnvironmentFault)
"""Errors that end a trajectory as a failure. Any other error (a full disk, a bug) ends the run, which can be resumed."""


def failure_of(error: EngineError | EnvironmentFault) -> FailureClass:
    return next(failure for kind, failure in _CLASSES if isinstance(error, kind))
