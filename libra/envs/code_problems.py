"""Programming problems of a file, each with tests of one function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.envs.environment import question_class
from libra.errors import ConfigError
from libra.seals import parsed_json

WHERE = "environment.args.problems"
_FORM = '{"prompt": "Write double(x): ...", "function": "double", "tests": [[[2], 4], [[0], 0]]}'


@dataclass(frozen=True, slots=True)
class Problem:
    """``tests`` are pairs of a list of arguments and the result, JSON-able."""

    text: str
    function: str
    tests: tuple[tuple[list[Any], Any], ...]

    @property
    def held_out(self) -> bool:
        """Whether it is for evaluation: 1 in 8, by a hash of its text."""
        return question_class(self.text) == 0


def read_problems(path: str) -> dict[str, list[Problem]]:
    """The problems of a file of JSON lines, by split; ConfigError if it is none, or a split is empty."""
    problems = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{WHERE}: cannot read {path!r} ({error}); type {WHERE}=FILE, or {WHERE}=null") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = parsed_json(line)
            tests = tuple((list(arguments), result) for arguments, result in row["tests"])
            problem = Problem(str(row["prompt"]), str(row["function"]), tests)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{WHERE}: {path}, line {number}: {type(error).__name__}: {error}; a line is e.g. {_FORM}"
            ) from error
        if not tests or not problem.function.isidentifier():
            raise ConfigError(
                f"{WHERE}: {path}, line {number}: no test, or no name of a function; a line is e.g. {_FORM}"
            )
        problems.append(problem)
    by_split = {
        "train": [each for each in problems if not each.held_out],
        "eval": [each for each in problems if each.held_out],
    }
    for split, found in by_split.items():
        if not found:
            raise ConfigError(
                f"{WHERE}: {path} has {len(problems)} problems, none for the split {split!r}; add some (1 in 8 is held "
                "out, by a hash of its text)"
            )
    return by_split
