"""Rewards, graders and calculators for every hostile text: each gives a number, or says what is wrong."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_input import HOSTILE_TEXT, PROMPT, TEXTS
from libra.envs import Environment, run_grader
from libra.envs.calculator import calculate
from libra.envs.reasoning_gym import ReasoningGym
from libra.envs.rewards import make_reward
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import RewardFault
from libra.testing import FixedTurns
from libra.types import (
    EndReason,
    Episode,
    Turn,
)
from libra.untrusted import (
    storable,
)

pytestmark = pytest.mark.timeout(60)


REWARDS = {
    name: make_reward(given)
    for name, given in {
        "gsm8k": "gsm8k",
        "flexible": {"name": "gsm8k", "method": "flexible"},
        "verl": {"name": "gsm8k", "like": "verl"},
        "math": "math",
        "dapo_math": "dapo_math",
        "tags": ["tag_format", "tag_count"],
    }.items()
}


def episode_of(text: str) -> Episode:
    return Episode("train-0-0-0", PROMPT, (Turn(text),), EndReason.ANSWERED)


def test_every_reward_is_a_number_for_every_text() -> None:
    for text in (*TEXTS, *map(storable, TEXTS)):
        for name, reward in REWARDS.items():
            score = reward(completion=text, answer="42", episode=episode_of(text))
            assert math.isfinite(score) and abs(score) <= 2, name


@given(HOSTILE_TEXT, HOSTILE_TEXT, st.sampled_from(sorted(REWARDS)))
def test_any_text_has_a_reward(text: str, answer: str, name: str) -> None:
    assert math.isfinite(REWARDS[name](completion=text, answer=answer, episode=episode_of(text)))


def test_the_environments_grade_every_text() -> None:
    arithmetic = ToolArithmetic()
    gym = ReasoningGym(dataset="chain_sum")
    tags = ReasoningGym(dataset="chain_sum", answer="tags")
    graders: list[Environment] = [arithmetic, gym, tags, FixedTurns()]
    for environment in graders:
        prompt = environment.prompt("train", 0)
        for text in TEXTS:
            reward = environment.grade(Episode("train-0-0-0", prompt, (Turn(storable(text)),), EndReason.ANSWERED))
            assert 0.0 <= reward <= 1.0


def test_tools_of_the_environments_answer_every_text_or_say_what_is_wrong() -> None:
    said = []
    for text in TEXTS:
        try:
            said.append(calculate(text))
        except ValueError as error:
            said.append(str(error))
    assert max(map(len, said)) < 200


@pytest.mark.parametrize(
    "reward", [1e308, -1e308, 2e9, math.inf, math.nan, 10**400, "1", None, 1j, np.float64("nan"), [1.0]]
)
def test_a_reward_that_no_gradient_survives_is_refused(reward: Any) -> None:
    class Odd(FixedTurns):
        def grade(self, episode: Episode) -> float:
            return reward  # type: ignore[no-any-return]

    with pytest.raises(RewardFault, match="the reward is"):
        asyncio.run(run_grader(Odd(), episode_of("x")))
