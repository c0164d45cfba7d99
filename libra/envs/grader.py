"""Grading of a finished trajectory: a finite number, a `libra.types.Late`, or a `RewardFault`."""

from __future__ import annotations

import inspect
import math
import numbers
import time
from typing import Any

from libra.envs.environment import Environment
from libra.envs.retries import BackOff, Refused, refused, with_retries
from libra.envs.tool_calls import Outcome, run_bounded
from libra.errors import RewardFault, RewardTimeout
from libra.named_parts import defined_at, users_place
from libra.types import EndReason, Episode, Late
from libra.untrusted import error_text, repr_text

MAX_REWARD = 1e9
"""Largest reward in magnitude: advantages and gradients are computed in float32."""


async def run_grader(
    environment: Environment, episode: Episode, timeout_s: float = 60.0, back_off: BackOff | None = None
) -> float | Late:
    """The value of ``environment.grade(episode)``; retries by ``back_off`` after HTTP 429.

    RewardFault if the reward raises, takes over ``timeout_s`` wall seconds (`RewardTimeout`), is
    not one finite number, or is refused in every retry. A trajectory without a reward never counts
    as a trajectory with reward 0.
    """
    where = f"environment {environment.name}, trajectory {episode.trajectory_id}"
    is_async, name = inspect.iscoroutinefunction(environment.grade), f"reward of {environment.name}"

    async def attempt() -> tuple[Outcome, Refused | None]:
        outcome = await run_bounded(lambda: environment.grade(episode), {}, timeout_s, is_async=is_async, name=name)
        return outcome, None if outcome is None else refused(outcome[1], time.time())

    (outcome, refusal), retries = await with_retries(
        attempt, lambda each: each[1], back_off or BackOff(), f"reward of {episode.trajectory_id}"
    )
    if outcome is None:
        raise RewardTimeout(_placed(f"{where}: the reward did not return within {timeout_s:g} s", None, environment))
    value, error = outcome
    if refusal is not None:
        raise RewardFault(f"{where}: the reward's API refuses calls (HTTP 429), after {retries} retries") from error
    try:
        if error is not None:
            raise RewardFault(f"{where}: the reward raised {error_text(error)}") from error
        return _checked_late(value, where) if isinstance(value, Late) else _checked(value, where)
    except RewardFault as fault:
        raise RewardFault(_placed(str(fault), fault.__cause__, environment)) from fault.__cause__


def _placed(message: str, cause: BaseException | None, environment: Environment) -> str:
    graders = getattr(environment, "graders", (environment.grade,))
    place = users_place(cause) or next(filter(None, map(defined_at, graders)), "")
    return f"{message[:1500]}{place and f' ({place.strip()})'}"


def _checked(value: Any, where: str) -> float:
    try:
        number = plain_number(value)
        reward = float(number) if isinstance(number, numbers.Real) else None
    except OverflowError as error:
        raise RewardFault(f"{where}: the reward is an integer too large for a float") from error
    except Exception as error:  # boundary: __float__ of a number of the reward's own is its code too
        raise RewardFault(f"{where}: the reward cannot be read as a number: {error_text(error)}") from error
    if reward is None:
        raise RewardFault(f"{where}: the reward is {repr_text(value)} ({type(value).__name__}); give one finite number")
    return bounded_reward(reward, where)


def plain_number(value: Any) -> Any:
    """A number of numpy, torch, decimal, ... as Python's own; other values unchanged."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except Exception:  # noqa: BLE001 boundary: an array of several raises what its library chose
            return value
    return float(value) if not isinstance(value, numbers.Real) and hasattr(type(value), "__float__") else value


def _checked_late(late: Late, where: str) -> Late:
    try:
        fast = None if late.fast is None else plain_number(late.fast) * 1.0  # of text that raises
        late = Late(fast, plain_number(late.offset) * 1.0, plain_number(late.factor) * 1.0)
        numbers_of_it = [late.offset, late.factor, *([] if late.provisional is None else [late.provisional])]
    except Exception as error:  # boundary: they are the reward's own
        raise RewardFault(f"{where}: of {repr_text(late)} a number cannot be read: {error_text(error)}") from error
    for number in numbers_of_it:
        bounded_reward(number, f"{where}, provisionally")
    return late


def bounded_reward(reward: float, where: str) -> float:
    """``reward``; RewardFault unless it is finite and at most `MAX_REWARD` in magnitude."""
    if not math.isfinite(reward):
        raise RewardFault(f"{where}: the reward is {reward}; it must be one finite number")
    if abs(reward) > MAX_REWARD:
        raise RewardFault(
            f"{where}: the reward is {reward:g}; it must be from {-MAX_REWARD:g} to {MAX_REWARD:g}, so that sums and squares of "
            "many remain finite"
        )
    return reward


def own_reward(episode: Episode) -> float:
    """The reward that the agent returned or posted to its gateway. An agent without a reward gets 0
    if it exceeded the limit of length or turns, else ValueError."""
    if episode.own_reward is None and episode.end_reason in (EndReason.LENGTH, EndReason.MAX_TURNS):
        return 0.0
    if episode.own_reward is None:
        raise ValueError(
            f"{episode.trajectory_id}: the agent gave no reward; let it return a number or {{'reward': NUMBER}}, or post one to "
            "/reward, or give libra.train a reward function"
        )
    return episode.own_reward
