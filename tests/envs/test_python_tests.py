import asyncio
import json

import pytest

from libra.envs import make_environment, run_action, run_grader
from libra.envs.python_tests import TASKS, PythonTests, read_problems
from libra.errors import ConfigError
from libra.types import ToolCall, ToolStatus

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("needs_sandbox")]

SOLUTIONS = (
    "sum(x for x in v if x > K)", "[x + K for x in v]", "v[::K]", "len([x for x in v if x % K == 0])",
    "sorted(v, reverse=True)[:K]", "v * K", "[w for w in v.split() if len(w) >= K]",
    "v[K % max(len(v), 1):] + v[:K % max(len(v), 1)]", "sum(i for i in range(v + 1) if i % K == 0)",
    "[int(c) for c in digits(v)]",
)  # fmt: skip
DIGITS = "def digits(n):\n    return (digits(n // K) if n >= K else '') + str(n % K)\n"


def answer_for(prompt):
    body = SOLUTIONS[prompt.facts["task"]]
    return f"Here it is:\n```python\nK = {prompt.facts['k']}\n{DIGITS}\nprint('noise')\ndef solve(v):\n    return {body}\n```\n"


def test_a_right_function_earns_one_for_every_family(make_episode):
    environment = make_environment("python_tests", {"num_tests": 4}, 0)
    seen = set()
    for index in range(200):
        prompt = environment.prompt("train", index)
        if prompt.facts["task"] not in seen:
            seen.add(prompt.facts["task"])
            assert asyncio.run(run_grader(environment, make_episode(prompt, answer_for(prompt)), 60.0)) == 1.0
    assert seen == set(range(len(TASKS)))


@pytest.mark.parametrize("answer", [
    "```python\n```",
    "```python\ndef solve(v): return None\n```",
    "```python\ndef solve(v):\n    while True: pass\n```",
    "```python\nimport os; os.write(3, b'0'); os._exit(0)\n```",
    "```python\nclass Same:\n    def __eq__(self, other): return True\ndef solve(v): return Same()\n```",
    "```python\nimport sys\nprint(sys._getframe(1).f_globals['source'][-40:])\ndef solve(v): return 0\n```",
])  # fmt: skip
def test_a_wrong_function_earns_nothing(answer, make_episode):
    environment = PythonTests(timeout_s=1.0, num_tests=3, key="k")
    prompts = (environment.prompt("eval", i) for i in range(99))
    prompt = next(p for p in prompts if any(right for _, right in environment.hidden_tests(p)))
    assert environment.grade(make_episode(prompt, answer)) == 0.0


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


def test_a_program_that_looks_for_the_answers_in_its_process_earns_nothing(make_episode):
    environment = PythonTests()
    for prompt in (environment.prompt("train", index) for index in range(12)):
        assert environment.grade(make_episode(prompt, f"```python\n{SEARCH}\n```")) == 0.0


def test_one_hidden_test_is_seen_at_a_time_and_none_is_in_the_prompt(make_episode):
    environment = PythonTests(num_tests=3)
    prompt = environment.prompt("train", 0)
    assert prompt.facts.keys() == {"task", "k"}
    kept = answer_for(prompt).replace("def solve(v):", "import builtins\ndef solve(v):\n    seen = getattr(builtins, 'seen', 0)"
                                      "\n    builtins.seen = seen + 1\n    1 / (seen == 0)")  # fmt: skip
    assert environment.grade(make_episode(prompt, kept)) == 1.0, "each test has a process of its own"
    assert PythonTests().hidden_tests(prompt) != PythonTests().hidden_tests(prompt)


def test_splits_share_no_task_and_number_whatever_the_seed():
    environments = [PythonTests(seed=0), PythonTests(seed=1)]
    pairs = {}
    for split in ("train", "eval"):
        facts = [environment.prompt(split, index).facts for environment in environments for index in range(300)]
        pairs[split] = {(fact["task"], fact["k"]) for fact in facts}
    assert len(pairs["eval"]) >= 5
    assert len(pairs["train"]) >= 40
    assert not pairs["train"] & pairs["eval"]


@pytest.mark.parametrize(("code", "content"), [
    ("print(6 * 7)", "42\n"),
    ("raise SystemExit(3)", "\n[exit code 3]"),
    ("print(1, flush=True)\nwhile 1: pass", "1\n\n[cut off after 1 s]"),
])  # fmt: skip
def test_the_tool_shows_what_a_program_prints_and_how_it_ended(code, content):
    environment = PythonTests(timeout_s=1.0)
    call = ToolCall("run_python", {"code": code})
    given = asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="a"))
    assert (given.status, given.content) == (ToolStatus.OK, content)


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    for n in range(2, 42):
        row = {"prompt": f"Write times{n}(x): x times {n}.", "function": f"times{n}"}
        with path.open("a") as file:
            print(json.dumps(row | {"tests": [[[2], 2 * n], [[0], 0], [[1], n]]}), file=file)
    return str(path)


def test_a_right_function_passes_the_tests_of_its_problem(problems, make_episode):
    world = PythonTests(problems=problems, partial=True)
    for split in ("train", "eval"):
        prompt = world.prompt(split, 1)
        text = prompt.messages[-1]["content"]
        name, n = text.split()[1].split("(")[0], int(text.split()[-1].strip("."))
        assert world.grade(make_episode(prompt, f"```python\ndef {name}(x): return x * {n}\n```")) == 1.0
        assert world.grade(make_episode(prompt, f"```python\ndef {name}(x): return 0\n```")) == pytest.approx(1 / 3)
        assert set(prompt.facts) == {"problem", "split"}


@pytest.mark.parametrize(
    "line",
    ["x", "{}", '{"prompt": "p", "function": "f", "tests": []}', '{"prompt": "p", "function": "a b", "tests": [[[1], 2]]}',
     '{"prompt": "p", "function": "f", "tests": [[[1]]]}', '{"prompt": "p", "function": "f", "tests": [[[1], 2]]}'],
)  # fmt: skip
def test_a_file_that_has_no_problems_for_both_splits_is_refused(line, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError):
        read_problems(str(path))
