"""Tasks to write a Python function: a tool runs programs, and hidden tests grade the answer.

Invariants
----------
1. A program gets the arguments of one hidden test in its own process, and no expected result:
   results leave the sandbox as JSON and are compared outside.
2. Hidden tests of the families `TASKS` are drawn at grading from a key of the grading process, so
   no seed reveals them. The prompt of a problem in a file has only its split and index as facts.
3. A program that damages its sandbox fails the test; a sandbox that cannot start is a failure of
   the environment.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.envs.environment import Environment, question_class
from libra.envs.sandbox import MEGABYTE, Limits, Sandbox, SandboxFailed, opener
from libra.envs.tool import tool
from libra.errors import ConfigError, EnvironmentFault
from libra.seals import parsed_json
from libra.types import Episode, Prompt

SYSTEM = (
    "Write the Python function that is asked for. You may try code with the tool run_python, which shows what it "
    "prints. Then reply with the whole function in one ```python block."
)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Task:
    """A family of functions with one free number ``{k}``: text, solution, and drawn test arguments.
    ``solution(k, *arguments)`` gives the expected result."""

    text: str
    solution: Callable[..., Any]
    arguments: Callable[[random.Random], list[Any]]


def _numbers(generator: random.Random) -> list[Any]:
    return [[generator.randint(-20, 20) for _ in range(generator.randint(0, 8))]]


def _word(generator: random.Random) -> list[Any]:
    return ["".join(generator.choice("abc de") for _ in range(generator.randint(0, 12)))]


def _count(generator: random.Random) -> list[Any]:
    return [generator.randint(0, 30)]


TASKS = tuple(
    Task(text, solution, arguments)
    for arguments, text, solution in (
        (
            _numbers,
            "the sum of the numbers in the list xs that are above {k}",
            lambda k, xs: sum(x for x in xs if x > k),
        ),
        (_numbers, "the list xs with {k} added to every element", lambda k, xs: [x + k for x in xs]),
        (_numbers, "every {k}-th element of the list xs, beginning with the first", lambda k, xs: xs[::k]),
        (_numbers, "how many numbers in the list xs are divisible by {k}", lambda k, xs: sum(x % k == 0 for x in xs)),
        (_numbers, "the {k} largest numbers of the list xs in descending order", lambda k, xs: sorted(xs)[::-1][:k]),
        (_word, "the string s repeated {k} times", lambda k, s: s * k),
        (
            _word,
            "the words of the string s that have at least {k} letters, as a list",
            lambda k, s: [w for w in s.split() if len(w) >= k],
        ),
        (
            _word,
            "the string s moved left by {k} places, around the end",
            lambda k, s: s[k % len(s) :] + s[: k % len(s)] if s else s,
        ),
        (_count, "the sum of the multiples of {k} from 0 to n, n included", lambda k, n: sum(range(0, n + 1, k))),
        (
            _count,
            "the digits of n (n >= 0) in base {k}, most significant first, as a list; [0] for 0",
            lambda k, n: _digits(n, k),
        ),
    )
)


def _digits(number: int, radix: int) -> list[int]:
    digits = [number % radix]
    while number >= radix:
        number //= radix
        digits.insert(0, number % radix)
    return digits


class PythonTests(Environment):
    """The environment registered as ``python_tests``.

    The reward is 1.0 if the function passes all hidden tests, else 0.0; with ``partial``, the share
    of passed tests. A hash of (task, number) or of the problem's text puts 1 in 8 questions into
    the evaluation split. Facts: ``task`` and ``k``; for a file ``split`` and ``problem``, its
    index.

    Parameters
    ----------
    problems : str, optional
        A file of JSON lines with "prompt", "function" and "tests", a list of ``[arguments,
        result]``. All workers must be able to read it; the model sees only the prompt. Without it,
        questions are from the families `TASKS`.
    num_tests : int
        Hidden tests per question of the families.
    timeout_s : float
        Wall seconds of one program, and of one hidden test.
    memory_mb : int
        Address space of one process, in 2**20 bytes.
    isolation : str
        "bubblewrap", "none", or your own function (`libra.envs.sandbox`).
    key : str, optional
        Seed of hidden tests, for tests and comparisons; by default random for each process.
    """

    def __init__(
        self, *, problems: str | None = None, num_tests: int = 8, timeout_s: float = 5.0, memory_mb: int = 512,
        partial: bool = False, seed: int = 0, isolation: str = "bubblewrap", key: str | None = None,
    ) -> None:  # fmt: skip
        for name, value, least in (("num_tests", num_tests, 1), ("memory_mb", memory_mb, 64)):
            if value < least:
                raise ConfigError(f"environment.args.{name}: got {value!r}; at least {least}")
        if not timeout_s > 0:
            raise ConfigError(f"environment.args.timeout_s: got {timeout_s!r}; above 0 seconds")
        self.seed, self.num_tests, self.timeout_s, self.partial = seed, num_tests, timeout_s, partial
        self.problems = None if problems is None else read_problems(problems)
        self._open = opener(isolation)
        self.isolation = isolation
        self.limits = Limits(memory_bytes=memory_mb * MEGABYTE, cpu_s=int(timeout_s) + 2)
        self._key = secrets.token_hex(16) if key is None else key
        # Above the program's limit, so that its process is killed and no thread hangs.
        self.tools = (tool(self.run_python, timeout_s=2 * timeout_s + 25.0),)

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        generator = random.Random(f"python_tests/{self.seed}/{split}/{index}")
        facts: dict[str, Any]
        if self.problems is not None:
            found = self.problems[split]
            number = generator.randrange(len(found)) if split == "train" else index % len(found)
            text, facts = found[number].text, {"problem": number, "split": split}
        else:
            while True:
                task, k = generator.randrange(len(TASKS)), generator.randint(2, 9)
                if (question_class(f"{task}/{k}") == 0) == (split == "eval"):
                    break
            names: dict[Any, str] = {_numbers: "xs", _word: "s", _count: "n"}
            name = names[TASKS[task].arguments]
            text, facts = f"Write solve({name}). Return {TASKS[task].text.format(k=k)}.", {"task": task, "k": k}
        messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": text})
        return Prompt(f"{split}-{index}", messages, facts)

    def hidden_tests(self, prompt: Prompt) -> list[tuple[list[Any], Any]]:
        """Arguments and expected result of each hidden test of a question."""
        if self.problems is not None:
            return list(self.problems[prompt.facts["split"]][prompt.facts["problem"]].tests)
        task, k = TASKS[prompt.facts["task"]], prompt.facts["k"]
        generator = random.Random(f"{self._key}/{prompt.prompt_id}")
        drawn = [task.arguments(generator) for _ in range(self.num_tests)]
        return [(arguments, task.solution(k, *arguments)) for arguments in drawn]

    def run_python(self, code: str) -> str:
        """Runs a Python program and shows what it prints.

        Args:
            code: The whole program.
        """
        with self._sandbox() as sandbox:
            finished = sandbox.run(code, timeout_s=self.timeout_s)
        if finished.exit_code is None:
            return f"{finished.output}\n[cut off after {self.timeout_s:g} s]"
        return finished.output if finished.exit_code == 0 else f"{finished.output}\n[exit code {finished.exit_code}]"

    def grade(self, episode: Episode) -> float:
        blocks = _BLOCK.findall(episode.answer)
        if not blocks:
            return 0.0
        facts, tests = episode.prompt.facts, self.hidden_tests(episode.prompt)
        function = "solve" if self.problems is None else self.problems[facts["split"]][facts["problem"]].function
        passed = 0
        with self._sandbox() as sandbox:
            for arguments, expected in tests:
                finished = sandbox.call(blocks[-1], function, arguments, timeout_s=self.timeout_s)
                if finished.exit_code is None:  # a program that was cut off would be cut off again
                    break
                passed += finished.exit_code == 0 and _same(finished.result, expected)
        return passed / len(tests) if self.partial else float(passed == len(tests))

    def _sandbox(self) -> Sandbox:
        try:
            return self._open(self.limits)
        except SandboxFailed as error:
            raise EnvironmentFault(f"python_tests: cannot start a sandbox: {error}") from error


def _same(result: str | None, expected: Any) -> bool:
    """Whether a program's JSON is the expected value with the same type: ``true`` is not 1."""
    try:
        return result is not None and json.dumps(json.loads(result)) == json.dumps(expected)
    except (ValueError, RecursionError):
        return False


_FORM = '{"prompt": "Write double(x): ...", "function": "double", "tests": [[[2], 4], [[0], 0]]}'


@dataclass(frozen=True, slots=True)
class Problem:
    """``tests`` are pairs of a list of arguments and the result, JSON-able."""

    text: str
    function: str
    tests: tuple[tuple[list[Any], Any], ...]


def read_problems(path: str) -> dict[str, list[Problem]]:
    """Problems of a file of JSON lines, by split; ConfigError for a malformed file, an empty
    split."""
    where = "environment.args.problems"
    by_split: dict[str, list[Problem]] = {"train": [], "eval": []}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read {path!r} ({error}); type {where}=FILE, or {where}=null") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = parsed_json(line)
            tests = tuple((list(arguments), result) for arguments, result in row["tests"])
            problem = Problem(str(row["prompt"]), str(row["function"]), tests)
            if not tests or not problem.function.isidentifier():
                raise ValueError("no test, or no name of a function")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where}: {path}, line {number}: {type(error).__name__}: {error}; a line is e.g. {_FORM}"
            ) from error
        by_split["eval" if question_class(problem.text) == 0 else "train"].append(problem)
    for split, found in by_split.items():
        if not found:
            raise ConfigError(
                f"{where}: {path} has {len(lines)} problems, none for the split {split!r}; add some (1 in 8 is held "
                "out, by a hash of its text)"
            )
    return by_split
