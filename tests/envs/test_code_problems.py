"""Programming problems of a file: the model sees the prompt, the tests stay outside of the sandbox."""

from __future__ import annotations

import json

import pytest

from libra.envs.code_problems import read_problems
from libra.envs.python_tests import PythonTests
from libra.errors import ConfigError


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [
        {
            "prompt": f"Write times{n}(x): x times {n}.",
            "function": f"times{n}",
            "tests": [[[2], 2 * n], [[0], 0], [[1], n]],
        }
        for n in range(2, 42)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_right_function_passes_the_tests_of_its_problem(problems, make_episode):
    world = PythonTests(problems=problems, isolation="best", partial=True)
    for split in ("train", "eval"):
        prompt = world.prompt(split, 1)
        text = prompt.messages[-1]["content"]
        name, n = text.split()[1].split("(")[0], int(text.split()[-1].strip("."))
        assert world.grade(make_episode(prompt, f"```python\ndef {name}(x): return x * {n}\n```")) == 1.0
        assert world.grade(make_episode(prompt, f"```python\ndef {name}(x): return 0\n```")) == pytest.approx(1 / 3)
        assert world.grade(make_episode(prompt, f"```python\ndef solve(x): return x * {n}\n```")) == 0.0
        assert set(prompt.facts) == {"problem", "split"}


def test_no_problem_is_in_both_splits(problems):
    world = PythonTests(problems=problems, isolation="best")
    texts = {split: {world.prompt(split, i).messages[-1]["content"] for i in range(200)} for split in ("train", "eval")}
    assert texts["train"]
    assert texts["eval"]
    assert not texts["train"] & texts["eval"]


@pytest.mark.parametrize(
    "line", ["x", "{}", '{"prompt": "p", "function": "f", "tests": []}', '{"prompt": "p", "function": "a b", "tests": [[[1], 2]]}',
             '{"prompt": "p", "function": "f", "tests": [[1, 2]]}', '{"prompt": "p", "function": "f", "tests": [[[1]]]}'],
)  # fmt: skip
def test_a_line_that_is_no_problem_is_named(line, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"environment\.args\.problems: .*line 1"):
        read_problems(str(path))


def test_a_file_without_held_out_problems_is_named(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "p", "function": "f", "tests": [[[1], 2]]}')
    with pytest.raises(ConfigError, match="none for the split"):
        read_problems(str(path))
