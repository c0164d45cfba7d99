import json
from collections import Counter
from types import SimpleNamespace as Table

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import FunctionEnvironment, make_environment
from libra.errors import ConfigError
from libra.types import Prompt, Turn


def constant(completion):
    return 0.0


def add(a: int, b: int) -> int:
    """Sum.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def texts(environment, split, count):
    return [environment.prompt(split, index).messages[-1]["content"] for index in range(count)]


@given(count=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_pass_shows_every_training_prompt_once_and_never_a_held_out_one(count, seed):
    environment = FunctionEnvironment(prompts=[str(i) for i in range(count)], reward=constant, seed=seed)
    held_out = {str(i) for i in range(9, count, 10)}
    size = count - len(held_out)
    shown = texts(environment, "train", 3 * size)
    for turn in range(3):
        assert Counter(shown[turn * size : (turn + 1) * size]) == Counter(set(map(str, range(count))) - held_out)
    again = FunctionEnvironment(prompts=map(str, range(count)), reward=constant, seed=seed)
    assert shown == texts(again, "train", 3 * size)
    if held_out:
        assert set(texts(environment, "eval", 2 * len(held_out))) == held_out


def test_a_prompt_that_comes_again_has_the_same_name_told_without_making_it():
    environment = FunctionEnvironment(prompts=[str(i) for i in range(30)], reward=constant)
    asked = [environment.prompt("train", index) for index in range(81)]
    assert [environment.prompt_id("train", index) for index in range(81)] == [prompt.prompt_id for prompt in asked]
    assert len({(prompt.prompt_id, prompt.messages[-1]["content"]) for prompt in asked}) == 27
    assert environment.prompt_id("eval", 0) == ""


def test_too_few_prompts_to_hold_any_out_is_said_when_one_is_asked_for():
    environment = FunctionEnvironment(prompts=["a", "b"], reward=constant)
    for split in ("eval", "test"):
        with pytest.raises(ConfigError):
            environment.prompt(split, 0)


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


@pytest.mark.parametrize("method", ["to_dicts", "to_pylist", "to_dict", "compute", "collect"])
def test_the_rows_of_a_table_are_its_prompts(method):
    rows = [{"prompt": np.array([{"role": "user", "content": "a"}]), "answer": np.int64(3)}]
    environment = FunctionEnvironment(prompts=Table(columns=[], **{method: lambda *orient: rows}), reward=constant)
    assert environment.prompt("train", 0) == Prompt("train-0", ({"role": "user", "content": "a"},), {"answer": 3})


@pytest.mark.parametrize(("arguments", "says"), [
    ({"prompts": []}, "at least one"),
    ({"prompts": "one"}, "prompts"),
    ({"prompts": ["a", []]}, r"prompts\[1\]"),
    ({"prompts": [{"question": "q"}]}, "'prompt'"),
    ({"prompts": [{"prompt": "q", "completion": "c"}]}, "'completion'"),
    ({"prompts": ["q"], "reward": lambda answr: 0.0}, "answr"),
    ({"prompts": [{"prompt": "q", "answer": 1}, "r"], "reward": lambda answer: 0.0}, "answer"),
    ({"prompts": ["q"], "tools": [add, add]}, "add"),
    ({"prompts": iter(int, 1)}, "1,000,000"),
    ({"prompts": {"prompt": ["q"], "answer": [1]}}, "zip"),
    ({"prompts": {"train": Table(columns=["prompt"])}}, r"\['train'\]"),
    ({"prompts": Table(columns=["prompt"])}, "table"),
    ({"prompts": [{"prompt": "q", "answer": "Paris"}], "reward": "gsm8k"}, "'Paris'"),
])  # fmt: skip
def test_what_cannot_work_is_said_at_construction(arguments, says):
    with pytest.raises(ConfigError, match=says):
        FunctionEnvironment(**{"reward": constant, **arguments})


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="questions.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
        return str(path)

    return make


def test_questions_come_from_the_file_and_are_graded_by_the_named_reward(write, make_episode):
    path = write({"question": "6 * 7?", "solution": 42, "level": 3, "answer": "not this one"})
    held_out = write({"question": "1 + 1?", "solution": "2"}, name="eval.jsonl")
    columns = {"prompt": "question", "answer": "solution"}
    args = {"path": path, "eval_path": held_out, "reward": "gsm8k", "system": "Be short.", **columns}
    environment = make_environment("jsonl", args, seed=0)
    prompt = environment.prompt("train", 0)
    assert [message["content"] for message in prompt.messages] == ["Be short.", "6 * 7?"]
    assert prompt.facts == {"answer": 42, "level": 3}
    assert environment.prompt("eval", 0).messages[-1]["content"] == "1 + 1?"
    assert [environment.grade(make_episode(prompt, turns=(Turn(text),))) for text in ("#### 42", "42")] == [1.0, 0.0]


@pytest.mark.parametrize(("rows", "says"), [
    (["{"], "line 1"),
    pytest.param(["[" * 100_000], "line 1", id="deep"),
    ([{"prompt": "q", "answer": 1}, [1]], "line 2"),
    ([{"prompt": "q"}], "environment.args.answer"),
    ([{"prompt": "q", "answer": 1, "episode": 1}], "'episode'"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_says_where(write, rows, says):
    with pytest.raises(ConfigError, match=says):
        make_environment("jsonl", {"path": write(*rows), "reward": "gsm8k"}, seed=0)
