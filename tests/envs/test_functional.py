from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import FunctionEnvironment
from libra.errors import ConfigError


def constant(completion: str) -> float:
    return 0.0


def add(a: int, b: int) -> int:
    """Sum.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def texts(environment: FunctionEnvironment, split: str, count: int) -> list[str]:
    return [environment.prompt(split, index).messages[-1]["content"] for index in range(count)]


@given(count=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_pass_shows_every_training_prompt_once_and_never_a_held_out_one(count, seed):
    environment = FunctionEnvironment(prompts=[str(i) for i in range(count)], reward=constant, seed=seed)
    held_out = {str(i) for i in range(9, count, 10)}
    size = count - len(held_out)
    shown = texts(environment, "train", 3 * size)
    for turn in range(3):
        assert Counter(shown[turn * size : (turn + 1) * size]) == Counter(set(map(str, range(count))) - held_out)
    assert shown == texts(
        FunctionEnvironment(prompts=map(str, range(count)), reward=constant, seed=seed), "train", 3 * size
    )
    if held_out:
        assert set(texts(environment, "eval", 2 * len(held_out))) == held_out


def test_a_prompt_that_comes_again_has_the_same_name_told_without_making_it():
    environment = FunctionEnvironment(prompts=[str(i) for i in range(30)], reward=constant)
    asked = [environment.prompt("train", index) for index in range(81)]
    assert [environment.prompt_id("train", index) for index in range(81)] == [prompt.prompt_id for prompt in asked]
    assert len({(prompt.prompt_id, prompt.messages[-1]["content"]) for prompt in asked}) == 27
    assert environment.prompt_id("eval", 0) == ""


def test_passes_and_seeds_have_orders_of_their_own():
    prompts = [str(i) for i in range(30)]
    one, two = (FunctionEnvironment(prompts=prompts, reward=constant, seed=seed) for seed in (1, 2))
    assert texts(one, "train", 27) != texts(two, "train", 27)
    assert texts(one, "train", 54)[:27] != texts(one, "train", 54)[27:]


def test_given_evaluation_prompts_are_used_in_order_and_all_prompts_train():
    environment = FunctionEnvironment(prompts=list("abcdefghijkl"), reward=constant, eval_prompts=["y", "x"])
    assert texts(environment, "eval", 3) == ["y", "x", "y"]
    assert set(texts(environment, "train", 12)) == set("abcdefghijkl")


def test_too_few_prompts_to_hold_any_out_is_said_when_one_is_asked_for():
    environment = FunctionEnvironment(prompts=["a", "b"], reward=constant)
    with pytest.raises(ConfigError, match=r"got 2 prompts.*eval_prompts=.*evaluation.prompts=0"):
        environment.prompt("eval", 0)


def test_an_evaluation_prompt_that_is_also_trained_on_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        FunctionEnvironment(prompts=["same"] * 10, reward=constant)
    assert "1 of 1 evaluation prompts are also training prompts" in caplog.text


def test_columns_become_facts_and_reach_the_reward_by_name(make_episode):
    seen = {}

    def reward(completion, answer, prompt, scale=2.0, level=0):
        seen.update(completion=completion, answer=answer, prompt=prompt, scale=scale, level=level)
        return 1.0

    row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": 42, "level": 3}
    environment = FunctionEnvironment(prompts=[row], reward=reward, system="Be short.", tools=[add])
    prompt = environment.prompt("train", 0)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.facts == {"answer": 42, "level": 3}
    assert environment.grade(make_episode(prompt, "42")) == 1.0
    assert seen == {"completion": "42", "answer": 42, "prompt": prompt, "scale": 2.0, "level": 3}
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add"]


def test_a_prompt_with_a_system_message_keeps_it():
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "?"}]
    environment = FunctionEnvironment(prompts=[messages], reward=constant, system="other")
    assert environment.prompt("train", 0).messages[0]["content"] == "mine"


def test_a_reward_with_open_keywords_gets_everything(make_episode):
    environment = FunctionEnvironment(prompts=[{"prompt": "q", "answer": 1}], reward=lambda **known: float(len(known)))
    assert environment.grade(make_episode(environment.prompt("train", 0))) == 4.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": "one"}, "list of prompts"),
        ({"prompts": [3]}, r"prompts\[0\]: got 3"),
        ({"prompts": ["a", []]}, r"prompts\[1\]"),
        ({"prompts": [[{"role": "user", "content": None}]]}, "list of messages"),
        ({"prompts": [{"question": "q"}]}, "no 'prompt' among its columns"),
        ({"prompts": [{"prompt": "q", "completion": "c"}]}, "'completion' has the name"),
        ({"prompts": ["q"], "eval_prompts": [7]}, r"eval_prompts\[0\]"),
        ({"prompts": ["q"], "reward": lambda answr: 0.0}, "'answr' is not one of prompt, completion, episode"),
        (
            {"prompts": [{"prompt": "q", "answer": 1}, "r"], "reward": lambda answer: 0.0},
            "not a column of every prompt",
        ),
        ({"prompts": ["q"], "reward": lambda *given: 0.0}, "cannot be passed by name"),
        ({"prompts": ["q"], "reward": 1.0}, "give a function"),
        ({"prompts": ["q"], "tools": [lambda x: x]}, "no type hint"),
        ({"prompts": ["q"], "tools": [add, add]}, "two are called 'add'"),
    ],
)
def test_what_cannot_work_is_said_at_construction(arguments, says):
    with pytest.raises(ConfigError, match=says):
        FunctionEnvironment(**{"reward": constant, **arguments})


def test_unknown_split_is_named():
    with pytest.raises(ConfigError, match="'test'"):
        FunctionEnvironment(prompts=["q"], reward=constant).prompt("test", 0)
