"""Write a Python function, try it out with a tool, and be graded by hidden tests in a restricted process."""

from __future__ import annotations

import hashlib
import json
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libra.envs.environment import Environment
from libra.envs.sandbox import MEGABYTE, Finished, run_program
from libra.envs.tool import tool
from libra.errors import ConfigError, EnvironmentFault
from libra.types import Episode, Prompt

SYSTEM = (
    "Write the Python function that is asked for. You may try code with the tool run_python, which shows what it "
    "prints. Then reply with the whole function in one ```python block."
)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_HELD_OUT_SHARE = 8

_HARNESS = """
import json as _json
_results = []
for _arguments in _json.loads({inputs!r}):
    try:
        _results.append([True, _json.loads(_json.dumps(solve(*_arguments)))])
    except Exception as _error:
        _results.append([False, type(_error).__name__])
print("\\n" + {mark!r} + _json.dumps(_results))
"""


@dataclass(frozen=True, slots=True)
class Task:
    """A family of functions with one free number.

    Attributes
    ----------
    text : str
        What ``solve`` does, with ``{k}`` for the number.
    solution : callable (k, *arguments)
        The right result.
    arguments : callable (generator)
        Arguments of one hidden test, JSON-able.
    """

    text: str
    solution: Callable[..., Any]
    arguments: Callable[[random.Random], list[Any]]


def _numbers(generator: random.Random) -> list[Any]:
    return [[generator.randint(-20, 20) for _ in range(generator.randint(0, 8))]]


def _word(generator: random.Random) -> list[Any]:
    return ["".join(generator.choice("abc de") for _ in range(generator.randint(0, 12)))]


def _count(generator: random.Random) -> list[Any]:
    return [generator.randint(0, 30)]


TASKS: tuple[Task, ...] = (
    Task(
        "Return the sum of the numbers in the list xs that are above {k}.",
        lambda k, xs: sum(x for x in xs if x > k),
        _numbers,
    ),
    Task("Return the list xs with {k} added to every element.", lambda k, xs: [x + k for x in xs], _numbers),
    Task("Return every {k}-th element of the list xs, beginning with the first.", lambda k, xs: xs[::k], _numbers),
    Task(
        "Return how many numbers in the list xs are divisible by {k}.",
        lambda k, xs: sum(x % k == 0 for x in xs),
        _numbers,
    ),
    Task(
        "Return the {k} largest numbers of the list xs in descending order.",
        lambda k, xs: sorted(xs)[::-1][:k],
        _numbers,
    ),
    Task("Return the string s repeated {k} times.", lambda k, s: s * k, _word),
    Task(
        "Return the words of the string s that have at least {k} letters, as a list.",
        lambda k, s: [w for w in s.split() if len(w) >= k],
        _word,
    ),
    Task(
        "Return the string s moved left by {k} places, around the end.",
        lambda k, s: s[k % len(s) :] + s[: k % len(s)] if s else s,
        _word,
    ),
    Task(
        "Return the sum of the multiples of {k} from 0 to n, n included.", lambda k, n: sum(range(0, n + 1, k)), _count
    ),
    Task(
        "Return the digits of n (n >= 0) in base {k}, most significant first, as a list; [0] for 0.",
        lambda k, n: _digits(n, k),
        _count,
    ),
)


def _digits(number: int, radix: int) -> list[int]:
    digits = [number % radix]
    while number >= radix:
        number //= radix
        digits.insert(0, number % radix)
    return digits


class PythonTests(Environment):
    """The environment registered as ``python_tests``.

    Reward is 1.0 where ``solve`` passes all hidden tests, else 0.0; with ``partial``, the share that it passes.
    Expected results never enter the process that runs the model's code. A (task, number) pair belongs to the
    evaluation split where a hash says so (1 in 8). Facts: ``task``, ``k``, ``inputs``, ``expected``. What the
    restricted process does and does not restrict is said in `libra.envs.sandbox`.

    Parameters
    ----------
    num_tests : int
        Hidden tests per question.
    timeout_s : float
        Wall seconds of one program; its CPU seconds are limited too.
    memory_mb : int
        Address space of one program, 2**20 bytes each.
    partial : bool
        Whether the reward is the share of tests passed.
    """

    def __init__(
        self, *, num_tests: int = 8, timeout_s: float = 5.0, memory_mb: int = 512, partial: bool = False, seed: int = 0
    ) -> None:
        for name, value, least in (("num_tests", num_tests, 1), ("memory_mb", memory_mb, 64)):
            if value < least:
                raise ConfigError(f"environment.args.{name}: got {value!r}; at least {least}")
        if not timeout_s > 0:
            raise ConfigError(f"environment.args.timeout_s: got {timeout_s!r}; above 0 seconds")
        self.seed, self.num_tests, self.timeout_s, self.partial = seed, num_tests, timeout_s, partial
        self.memory_bytes = memory_mb * MEGABYTE
        # The tool's own limit lies above the program's, so that the process is killed and not left behind.
        self.tools = (tool(self.run_python, timeout_s=2 * timeout_s + 5.0),)

    def prompt(self, split: str, index: int) -> Prompt:
        if split not in ("train", "eval"):
            raise ConfigError(f"split {split!r}: python_tests has the splits 'train' and 'eval'")
        generator = random.Random(f"python_tests/{self.seed}/{split}/{index}")
        while True:
            task_index, k = generator.randrange(len(TASKS)), generator.randint(2, 9)
            if (hashlib.sha256(f"{task_index}/{k}".encode()).digest()[0] % _HELD_OUT_SHARE == 0) == (split == "eval"):
                break
        task = TASKS[task_index]
        inputs = [task.arguments(generator) for _ in range(self.num_tests)]
        expected = [task.solution(k, *arguments) for arguments in inputs]
        names: dict[Any, str] = {_numbers: "xs", _word: "s", _count: "n"}
        text = f"Write solve({names[task.arguments]}). {task.text.format(k=k)}"
        messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": text})
        facts = {"task": task_index, "k": k, "inputs": inputs, "expected": expected}
        return Prompt(f"{split}-{index}", messages, facts)

    def run_python(self, code: str) -> str:
        """Runs a Python program and shows what it prints.

        Args:
            code: The whole program.
        """
        finished = self._run(code)
        if finished.exit_code is None:
            return f"{finished.output}\n[cut off after {self.timeout_s:g} s]"
        return finished.output if finished.exit_code == 0 else f"{finished.output}\n[exit code {finished.exit_code}]"

    def grade(self, episode: Episode) -> float:
        facts = episode.prompt.facts
        blocks = _BLOCK.findall(episode.answer)
        if not blocks:
            return 0.0
        passed = self._passed(blocks[-1], facts["inputs"], facts["expected"])
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    def _passed(self, code: str, inputs: list[Any], expected: list[Any]) -> list[bool]:
        """Which hidden tests ``code`` passes."""
        # The mark tells the results from what the code prints. Code that finds the mark gains nothing: it would still
        # have to work out the right results.
        mark = secrets.token_hex(16)
        finished = self._run(f"{code}\n{_HARNESS.format(inputs=json.dumps(inputs), mark=mark)}", output_chars=MEGABYTE)
        lines = [line[len(mark) :] for line in finished.output.splitlines() if line.startswith(mark)]
        if len(lines) != 1:
            return [False] * len(expected)
        try:
            results = json.loads(lines[0])
        except ValueError:
            return [False] * len(expected)
        if not isinstance(results, list) or len(results) != len(expected):
            return [False] * len(expected)
        return [result == [True, right] for result, right in zip(results, expected, strict=True)]

    def _run(self, code: str, output_chars: int = 20_000) -> Finished:
        try:
            return run_program(
                code, timeout_s=self.timeout_s, memory_bytes=self.memory_bytes, output_chars=output_chars
            )
        except OSError as error:
            raise EnvironmentFault(f"python_tests: a process to run code in could not be started: {error}") from error
