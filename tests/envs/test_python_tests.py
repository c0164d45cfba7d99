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
    environment = make_environment("python_tests", {"num_tests": 4, "isolation": "best"}, 0)
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
        "```python\nimport os; os.write(3, b'0'); os._exit(0)\n```",
        "```python\nclass Same:\n    def __eq__(self, other): return True\ndef solve(v): return Same()\n```",
        "```python\nimport sys\nprint(sys._getframe(1).f_globals['source'][-40:])\ndef solve(v): return 0\n```",
    ],
)
def test_a_wrong_function_earns_nothing(answer, make_episode):
    environment = PythonTests(timeout_s=2.0, num_tests=3, isolation="best", key="k")
    prompt = next(
        p
        for p in (environment.prompt("eval", i) for i in range(99))
        if any(right for _, right in environment.hidden_tests(p))
    )
    assert environment.grade(make_episode(prompt, answer)) == 0.0


def test_partial_reward_is_the_share_of_tests_passed(make_episode):
    environment = PythonTests(partial=True, num_tests=4, isolation="best", key="k")
    prompt = environment.prompt("train", 0)
    first = environment.hidden_tests(prompt)[0][0][0]
    answer = answer_for(prompt).replace("def solve(v):", f"def solve(v):\n    1 / (v != {first!r})")
    assert environment.grade(make_episode(prompt, answer)) == 0.75


SEARCH = """
import gc, glob, json, os, random, sys
def solve(v):
    words = ('expected', 'solution', 'hidden', 'inputs', 'tests', 'facts', 'right')
    frame = sys._getframe()
    while frame:
        for table in (frame.f_locals, frame.f_globals):
            for name, value in list(table.items()):
                if any(word in name for word in words) and name not in ('words',):
                    return value
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, dict) and 'expected' in found and found is not globals():
            return found['expected']
    for folder in ('/tmp', '/proc/self/environ', '/proc/self/cmdline', f'/proc/{os.getppid()}/environ', '/dev/shm'):
        for name in glob.glob(folder + '/*') or [folder]:
            try:
                return json.loads(open(name).read())['expected']
            except Exception:
                pass
    try:
        from libra.envs.python_tests import PythonTests
        return PythonTests().hidden_tests
    except Exception:
        return 0
"""


@pytest.mark.parametrize(
    "answer", [SEARCH, "def solve(v): return 0", "def solve(v): return []", "def solve(v): return v"]
)
def test_one_answer_to_all_questions_earns_what_chance_gives(answer, make_episode):
    """An answer that looked its results up in the grader once scored 24 of 24."""
    environment = PythonTests(isolation="best")
    prompts = [environment.prompt("train", index) for index in range(24)]
    right = sum(environment.grade(make_episode(prompt, f"```python\n{answer}\n```")) for prompt in prompts)
    assert right == 0.0


def test_one_hidden_test_is_seen_at_a_time_and_none_is_in_the_prompt(make_episode):
    environment = PythonTests(isolation="best", num_tests=3)
    prompt = environment.prompt("train", 0)
    assert prompt.facts.keys() == {"task", "k"}
    kept = answer_for(prompt).replace("def solve(v):", "import builtins\ndef solve(v):\n    seen = getattr(builtins, 'seen', 0)"
                                      "\n    builtins.seen = seen + 1\n    1 / (seen == 0)")  # fmt: skip
    assert environment.grade(make_episode(prompt, kept)) == 1.0, "each test has a process of its own"
    assert PythonTests(isolation="best").hidden_tests(prompt) != PythonTests(isolation="best").hidden_tests(prompt)


def test_output_before_the_results_does_not_spoil_them(make_episode):
    environment = PythonTests(num_tests=2, isolation="best")
    prompt = environment.prompt("train", 0)
    noisy = answer_for(prompt).replace(
        "def solve(v):", "print('noise', end='')\ndef solve(v):\n    print('more', end='')"
    )
    assert environment.grade(make_episode(prompt, noisy)) == 1.0


def test_splits_share_no_task_and_number_whatever_the_seed():
    environments = [PythonTests(seed=0, isolation="best"), PythonTests(seed=1, isolation="best")]
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
    environment = PythonTests(timeout_s=1.0, isolation="best")
    call = ToolCall("run_python", {"code": code})
    given = asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="a"))
    assert (given.status, given.content) == (ToolStatus.OK, content)
