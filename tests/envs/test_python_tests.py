from __future__ import annotations

import asyncio
import random

import pytest

from libra.envs import make_environment, run_action, run_grader
from libra.envs.python_tests import TASKS, PythonTests
from libra.types import ToolCall, ToolStatus

SOLUTIONS = (
    "sum(x for x in v if x > K)",
    "[x + K for x in v]",
    "v[::K]",
    "len([x for x in v if x % K == 0])",
    "sorted(v, reverse=True)[:K]",
    "v * K",
    "[w for w in v.split() if len(w) >= K]",
    "v[K % max(len(v), 1):] + v[:K % max(len(v), 1)]",
    "sum(i for i in range(v + 1) if i % K == 0)",
    "[int(c) for c in digits(v)]",
)
DIGITS = "def digits(n):\n    return (digits(n // K) if n >= K else '') + str(n % K)\n"


def answer_for(prompt) -> str:
    body = SOLUTIONS[prompt.facts["task"]]
    return f"Here it is:\n```python\nK = {prompt.facts['k']}\n{DIGITS}\ndef solve(v):\n    return {body}\n```\n"


def test_a_right_function_earns_one_for_every_family(make_episode):
    environment = make_environment("python_tests", {"num_tests": 4}, 0)
    seen = set()
    for index in range(200):
        prompt = environment.prompt("train", index)
        if prompt.facts["task"] not in seen:
            seen.add(prompt.facts["task"])
            assert asyncio.run(run_grader(environment, make_episode(prompt, answer_for(prompt)), 60.0)) == 1.0
    assert seen == set(range(len(TASKS)))


@pytest.mark.parametrize(
    "answer",
    [
        "no code at all",
        "```python\n```",
        "```python\ndef solve(v): return None\n```",
        "```python\ndef solve(v): raise SystemExit\n```",
        "```python\ndef solve(v): return {1}\n```",
        "```python\nimport os; os._exit(0)\n```",
        "```python\ndef solve(v):\n    while True: pass\n```",
        "```python\n1 +\n```",
        "```python\nimport sys\nprint(sys._getframe(1).f_globals['source'][-40:])\ndef solve(v): return 0\n```",
    ],
)
def test_a_wrong_function_earns_nothing(answer, make_episode):
    environment = PythonTests(timeout_s=1.0, num_tests=3)
    prompt = next(p for p in (environment.prompt("eval", i) for i in range(99)) if any(p.facts["expected"]))
    assert environment.grade(make_episode(prompt, answer)) == 0.0


def test_partial_reward_is_the_share_of_tests_passed(make_episode):
    environment = PythonTests(partial=True, num_tests=4)
    prompt = environment.prompt("train", 0)
    answer = answer_for(prompt) + answer_for(prompt).replace(
        "def solve(v):", "seen = []\ndef solve(v):\n    seen.append(v); 1 / (len(seen) > 1)"
    )
    assert environment.grade(make_episode(prompt, answer)) == 0.75


def test_output_before_the_results_does_not_spoil_them(make_episode):
    environment = PythonTests(num_tests=2)
    prompt = environment.prompt("train", 0)
    noisy = answer_for(prompt).replace(
        "def solve(v):", "print('noise', end='')\ndef solve(v):\n    print('more', end='')"
    )
    assert environment.grade(make_episode(prompt, noisy)) == 1.0


def test_splits_share_no_task_and_number_whatever_the_seed():
    environments = [PythonTests(seed=0), PythonTests(seed=1)]
    pairs = {}
    for split in ("train", "eval"):
        facts = [environment.prompt(split, index).facts for environment in environments for index in range(300)]
        pairs[split] = {(fact["task"], fact["k"]) for fact in facts}
    assert len(pairs["eval"]) >= 5
    assert len(pairs["train"]) >= 40
    assert not pairs["train"] & pairs["eval"]


def test_expected_results_are_what_the_solutions_give():
    for task in TASKS:
        arguments = task.arguments(random.Random(0))
        assert task.solution(3, *arguments) is not None
        assert "{k}" in task.text


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("print(6 * 7)", "42\n"),
        ("raise SystemExit(3)", "\n[exit code 3]"),
        ("print(1, flush=True)\nwhile 1: pass", "1\n\n[cut off after 1 s]"),
    ],
)
def test_the_tool_shows_what_a_program_prints_and_how_it_ended(code, content):
    environment = PythonTests(timeout_s=1.0)
    call = ToolCall("run_python", {"code": code})
    given = asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="a"))
    assert (given.status, given.content) == (ToolStatus.OK, content)
