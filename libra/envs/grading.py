"""Grades one finished trajectory: a finite number, or a `RewardFault` that names environment, trajectory and value."""

from __future__ import annotations

import inspect
import math
import numbers

import numpy as np

from libra.envs.actions import run_bounded
from libra.envs.environment import Environment
from libra.errors import RewardFault, RewardTimeout
from libra.types import Episode


async def run_grader(environment: Environment, episode: Episode, timeout_s: float = 60.0) -> float:
    """``environment.grade(episode)``, bounded by ``timeout_s`` wall seconds.

    Raises
    ------
    RewardFault
        Where the reward raises, hangs (`RewardTimeout`), is NaN or infinite, or is no number. There is no default: a
        trajectory without a reward has none, and is not counted as one with reward 0.
    """
    where = f"environment {environment.name}, trajectory {episode.trajectory_id}"
    outcome = await run_bounded(
        lambda: environment.grade(episode),
        {},
        timeout_s,
        is_async=inspect.iscoroutinefunction(environment.grade),
        name=f"reward of {environment.name}",
    )
    if outcome is None:
        raise RewardTimeout(f"{where}: the reward did not return within {timeout_s:g} s")
    value, error = outcome
    if error is not None:
        raise RewardFault(f"{where}: the reward raised {type(error).__name__}: {error}") from error
    if not isinstance(value, numbers.Real | np.bool_):
        shown = repr(value)
        raise RewardFault(
            f"{where}: the reward is {shown[:200]} ({type(value).__name__}); it must be one finite number"
        )
    try:
        reward = float(value)
    except OverflowError as error:
        raise RewardFault(f"{where}: the reward is an integer too large for a float") from error
    if not math.isfinite(reward):
        raise RewardFault(f"{where}: the reward is {reward}; it must be one finite number")
    return reward
