import asyncio
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch

from libra.envs import FunctionEnvironment, run_grader
from libra.errors import RewardFault, RewardTimeout
from libra.types import Late

gate = threading.Event()


def graded(reward, make_episode, timeout_s=10.0):
    environment = FunctionEnvironment(prompts=["hi"], reward=reward)
    episode = make_episode(environment.prompt("train", 0), "four")
    return asyncio.run(run_grader(environment, episode, timeout_s))


async def waits(completion):
    return len(completion) / 2


@pytest.mark.parametrize(("reward", "value"), [
    (lambda completion: len(completion), 4.0),
    (lambda completion: np.bool_(True), 1.0),
    (lambda prompt, episode: -float(episode.prompt is prompt), -1.0),
    (waits, 2.0),
    (lambda completion: waits(completion), 2.0),
    (lambda completion: torch.tensor([3.0]), 3.0),
    ({"function": lambda completion: Decimal("1.5"), "weight": 2}, 3.0),
])  # fmt: skip
def test_a_finite_number_is_the_reward(reward, value, make_episode):
    given = graded(reward, make_episode)
    assert given == value
    assert type(given) is float


def raises(completion):
    raise ZeroDivisionError("nothing to divide")


@pytest.mark.parametrize(("reward", "says"), [
    (raises, f"ZeroDivisionError: nothing to divide (in {__file__}, line {raises.__code__.co_firstlineno + 1})"),
    (lambda completion: float("nan"), "nan"),
    (lambda completion: float("inf"), "inf"),
    (lambda completion: None, "None"),
    (lambda completion: "1.0", "'1.0'"),
    (lambda completion: torch.tensor([1.0, 2.0]), "tensor([1., 2.])"),
    (lambda completion: 10**400, "too large"),
    (lambda completion: Late(fast=10**400), "too large"),
    (lambda completion: Late(fast="1"), ""),
    (lambda completion: Late(offset=float("nan")), ""),
    (lambda completion: exit(1), "SystemExit"),
])  # fmt: skip
def test_anything_else_is_a_fault_that_names_environment_trajectory_and_value(reward, says, make_episode):
    with pytest.raises(RewardFault) as caught:
        graded(reward, make_episode)
    for part in ("FunctionEnvironment", "train-0-0-0", says, f"(in {__file__}, line "):
        assert part in str(caught.value)


def test_a_reward_that_hangs_is_a_fault(make_episode):
    with pytest.raises(RewardTimeout):
        graded(lambda completion: gate.wait(), make_episode, timeout_s=0.01)
    gate.set()
