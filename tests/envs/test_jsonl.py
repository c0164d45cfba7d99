from __future__ import annotations

import json

import pytest

from libra.envs import make_environment
from libra.errors import ConfigError
from libra.types import Turn


@pytest.fixture
def write(tmp_path):
    def make(*rows: object, name: str = "questions.jsonl") -> str:
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


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["{"], "line 1: not JSON"),
        pytest.param(["[" * 100_000], "line 1: not JSON .nested too deeply", id="deep"),
        ([{"prompt": "q", "answer": 1}, [1]], "line 2: got list"),
        ([{"prompt": "q"}], r"no column 'answer' among \['prompt'\]; type environment.args.answer=NAME"),
        ([{"prompt": "q", "answer": 1, "episode": 1}], "'episode' has the name of an argument"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(write, rows, says):
    with pytest.raises(ConfigError, match=says):
        make_environment("jsonl", {"path": write(*rows), "reward": "gsm8k"}, seed=0)


def test_a_file_that_is_not_there_is_a_config_error():
    with pytest.raises(ConfigError, match=r"environment\.args\.path: cannot read 'nowhere.jsonl'"):
        make_environment("jsonl", {"path": "nowhere.jsonl", "reward": "gsm8k"}, seed=0)
