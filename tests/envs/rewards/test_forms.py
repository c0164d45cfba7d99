"""Reward functions as TRL's and verifiers' users write them, called as those libraries call them."""

import asyncio
import sys
import types

import pytest

from libra.envs import FunctionEnvironment, run_grader
from libra.errors import ConfigError, RewardFault
from libra.types import EndReason, Episode, ToolCall, ToolReturn, ToolStatus, Turn

CHAT = [{"role": "user", "content": "6 * 7?"}]
TURNS = (
    Turn("let me see", (ToolCall("add", {"a": 1}),), (ToolReturn("add", ToolStatus.OK, "42"),), 3, (5, 6, 7)),
    Turn("It is 42", num_tokens=2, token_ids=(8, 9)),
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
MESSAGES = [
    {"role": "assistant", "content": "let me see", "tool_calls": CALLS},
    {"role": "tool", "name": "add", "content": "42"},
    {"role": "assistant", "content": "It is 42"},
]


def graded(reward, *, prompt=CHAT, turns=TURNS, **columns):
    """The reward as a run grades it, for one prompt with these columns."""
    environment = FunctionEnvironment(prompts=[{"prompt": prompt, **columns}], reward=reward)
    episode = Episode("train-0-0-0", environment.prompt("train", 0), turns, EndReason.ANSWERED)
    return asyncio.run(run_grader(environment, episode))


def test_trl_conversations_are_lists_of_messages():
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [1.0]

    graded(reward, answer=42, level="easy")
    assert (seen["prompts"], seen["completions"], seen["completion_ids"]) == ([CHAT], [MESSAGES], [[5, 6, 7, 8, 9]])
    assert (seen["answer"], seen["level"]) == ([42], ["easy"])


def test_trl_rewards_may_take_less_and_be_async():
    def lengths(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    async def exact(completions, answer):
        await asyncio.sleep(0)
        return [1.0 if c[-1]["content"].endswith(a) else 0.0 for c, a in zip(completions, answer, strict=True)]

    assert graded(lengths, prompt="6 * 7?") == len("It is 42")
    assert graded(exact, answer="42") == 1.0
    assert graded([exact, {"function": lengths, "weight": 0.5}], answer="41") == 0.5 * len(MESSAGES)


def test_none_leaves_a_function_out_and_only_nones_are_no_reward():
    silent, half = (lambda completions: [None], lambda completions: [0.5])
    assert graded([silent, half]) == 0.5
    with pytest.raises(RewardFault):
        graded(silent)


@pytest.mark.parametrize("answer", [[], [1.0, 2.0], 1.0])
def test_a_trl_reward_answers_with_one_entry_per_completion(answer):
    with pytest.raises(RewardFault):
        graded(lambda completions: answer)


def test_verifiers_rewards_are_given_messages_answer_info_and_state():
    seen = {}

    async def reward(prompt, completion, answer, state, info, task):
        seen.update(prompt=prompt, completion=completion, answer=answer, state=state, info=info, task=task)
        return 1.0

    graded(reward, answer="42", level=3)
    assert seen["prompt"] == CHAT
    assert seen["completion"] == seen["state"]["completion"] == MESSAGES
    assert (seen["answer"], seen["info"], seen["task"]) == ("42", {}, "default")
    assert (seen["state"]["turn"], seen["state"]["level"], seen["state"]["is_truncated"]) == (2, 3, False)


def annotated(completion: list[dict[str, str]], answer: str) -> float:
    return float(completion[-1]["content"].endswith(answer))


def marked(completion, answer):
    return float(completion[-1]["content"].endswith(answer))


annotated.__annotations__["completion"] = list
marked._vf_weight = 0.25  # what @vf.reward(weight=0.25) does


@pytest.mark.parametrize(("reward", "value"), [(annotated, 1.0), (marked, 0.25)])
def test_verifiers_rewards_are_known_by_annotation_or_mark(reward, value):
    assert graded(reward, answer="42") == value


def test_a_rubric_is_its_functions_times_their_weights_with_its_parser():
    def correct(completion, answer, parser, state):
        return float(parser(completion) == answer)

    async def turns(state):
        return float(state["turn"])

    parser = {"parser": lambda messages: messages[-1]["content"][-2:]}
    rubric = types.SimpleNamespace(funcs=[correct, turns], weights=[1.0, 0.1], class_objects=parser)
    assert graded(rubric, answer="42") == pytest.approx(1.2)
    rubric.weights = [1.0]
    with pytest.raises(ConfigError):
        graded(rubric, answer="42")


def test_what_the_parameters_leave_open_has_to_be_said():
    def open_to_both(completion, info):
        return float(isinstance(completion, str))

    with pytest.raises(ConfigError):
        graded(open_to_both, info={"a": 1})
    assert graded({"function": open_to_both, "form": "libra"}, info={"a": 1}) == 1.0
    assert graded({"function": open_to_both, "form": "verifiers"}, info={"a": 1}) == 0.0


def test_names_functions_and_weights_add_up(monkeypatch):
    module = types.ModuleType("rewards_of_mine")
    module.half = lambda completions, **kwargs: [0.5]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    turns = (Turn("#### 42"),)
    assert graded(["gsm8k", "rewards_of_mine:half"], answer="42", turns=turns) == 1.5
    assert graded({"function": "rewards_of_mine:half", "weight": 4}, answer="42", turns=turns) == 2.0
    assert graded([{"name": "gsm8k", "weight": 0.5}, "gsm8k"], answer="42", turns=turns) == 1.5


@pytest.mark.parametrize("reward", [
    "nowhere:reward",
    {"function": len, "scale": 2},
    {"function": annotated, "form": "tlr"},
    {"function": annotated, "weight": "1"},
    [annotated, 3],
    lambda states, completions: [0.0],
])  # fmt: skip
def test_what_cannot_be_is_told_before_a_run(reward):
    with pytest.raises(ConfigError):
        graded(reward, answer="42")
