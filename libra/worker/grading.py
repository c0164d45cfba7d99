"""Grades one trajectory of a group: its reward, or its failure class if the reward failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra.envs import Environment, run_grader
from libra.envs.grading import bounded_reward
from libra.errors import RewardFault
from libra.types import Episode, Trajectory
from libra.untrusted import repr_text
from libra.worker.failure_classes import failure_of

GRADE_TIMEOUT_S = 60.0


def score_fault(numbers: Any, num: int) -> str | None:
    """What is wrong with what a user's reward node gave for ``num`` episodes; None if it has one entry for each."""
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
) -> None:
    """Give ``member`` its reward, or its failure class.

    A grader that failed grades the same trajectory again, ``resample`` times: replacing the trajectory would bias the sample.
    ``extra[index]`` is added to the environment's reward.
    """
    if not member.failure.trains:
        return
    failed = [member.retried] if member.retried else []
    for left in reversed(range(resample + 1)):
        try:
            reward = await run_grader(environment, episode, GRADE_TIMEOUT_S)
            member.reward = reward if extra is None else _with_extra(reward, extra[index], member)
            break
        except RewardFault as error:
            failure = failure_of(error)
            if left:
                failed.append(str(failure))
                continue
            member.failure, member.failure_detail, member.reward = failure, str(error)[:2000], float("nan")
    member.retried = ",".join(failed)


def _with_extra(reward: float, more: float, member: Trajectory) -> float:
    try:
        total = reward + float(more)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFault(
            f"{member.trajectory_id}: the reward node returned {repr_text(more)}; it must be a finite number"
        ) from error
    return bounded_reward(total, f"{member.trajectory_id}, with what the reward node returned")
