"""The checks of the driver: what they count is what engines see, and what they let pass."""

from pathlib import Path

import numpy as np
import pytest

import libra
from libra.config import config_from_dict
from libra.driver.model_checks import checked_model
from libra.driver.prompt_checks import ChatTemplate, check_prompts
from libra.envs import Environment, FunctionEnvironment
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import ConfigError
from libra.rollout import load_chat_format
from libra.worker.trajectory.graded_members import score_fault

SHIPPED = Path(libra.__file__).parent / "assets" / "tiny_arithmetic"


def config(**rollout):
    return config_from_dict({"rollout": rollout})


def constant(completion):
    return 0.0


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("shipped", [True, False], ids=["shipped", "explained"])
def test_tokens_of_a_prompt_are_those_of_the_chat_format(random_model, shipped, with_tools):
    """The random model's template leaves tools out, so that they are explained."""
    directory = SHIPPED if shipped else random_model
    environment = ToolArithmetic()
    schemas = environment.tool_schemas if with_tools else []
    messages = environment.prompt("train", 0).messages
    wanted = len(load_chat_format(directory, schemas).prompt_ids(messages))
    template = ChatTemplate(checked_model(str(directory)))
    found = template.tokens_beyond(messages, schemas, 1)
    assert found is not None
    assert abs(found - wanted) <= (8 if schemas and not shipped else 0), "the explanation has a message's frame"
    assert template.tokens_beyond(messages, schemas, found + 1) is None


def test_only_prompts_that_fill_the_context_are_refused():
    template = ChatTemplate(checked_model("libra/tiny-arithmetic"))
    environment = FunctionEnvironment(prompts=["1 + 1"] * 30 + ["1 + 1 " * 20], reward=constant)
    check_prompts(config(max_context_tokens=512), environment, template, started_here=True)
    with pytest.raises(ConfigError, match="train-27"):
        check_prompts(config(max_context_tokens=100), environment, template, started_here=True)


class OnWorkers(Environment):
    """Its prompts need what only workers have."""

    def prompt(self, split, index):
        raise OSError("not on this machine")

    def grade(self, episode):
        return 0.0


class SetUp(OnWorkers):
    async def setup(self):
        """On each worker."""


def test_prompts_that_only_workers_can_make_are_left_to_them():
    check_prompts(config(), OnWorkers(), None, started_here=False)
    check_prompts(config(), SetUp(), None, started_here=True)
    with pytest.raises(ConfigError, match="not on this machine"):
        check_prompts(config(), OnWorkers(), None, started_here=True)


def test_what_a_reward_node_gives_is_one_entry_for_each_episode():
    assert score_fault([1.0, 2.0], 2) is None
    assert score_fault(np.zeros(2), 2) is None
    assert "gave 1 numbers for 2 episodes" in str(score_fault([1.0], 2))
    for given in (0.5, "ab", {0: 1.0, 1: 2.0}, None):
        assert "not a list of numbers" in str(score_fault(given, 2))
