"""Repair tasks of a file, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from examples.repair.bugs import Bug, code_lines_at, function_at
from examples.repair.library import Library
from libra.envs.environment import question_class
from libra.errors import ConfigError
from libra.seals import parsed_json

SHIPPED = Path(__file__).with_name("tasks.jsonl")
SHOWN = ("files", "failure", "function")
"""How much of a task is shown: names of files; also what one failing test says; also the function
with the bug."""
EDITS = ("text", "line")
"""How an edit says where: by a text that occurs once, or by the number of a line and a piece of
it."""


@dataclass(frozen=True, slots=True)
class Task:
    """A library with a bug in one of its files.

    Attributes
    ----------
    failing : mapping
        Messages of the tests that fail with the bug, by name.
    passing : tuple of str
        Tests that pass with the bug and without it.
    """

    library: Library
    path: str
    bug: Bug
    failing: Mapping[str, str]
    passing: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """Texts of the library with the bug, by path."""
        sound = self.library.files
        return {**sound, self.path: self.bug.put_in(sound[self.path])}

    @property
    def split_class(self) -> int:
        """`question_class` of the bug alone."""
        return question_class("/".join((self.library.name, self.path, *map(str, self.bug))))

    @property
    def function(self) -> str:
        """The function with the bug."""
        text = self.files[self.path]
        first, last = function_at(text, self.bug.line)
        return "\n".join(text.splitlines()[first - 1 : last])

    @property
    def numbered_function(self) -> str:
        """The function with the bug, each line after its number in the file."""
        first, _ = function_at(self.files[self.path], self.bug.line)
        return numbered(self.function, first)

    @property
    def code_lines(self) -> int:
        """Lines of that function without its docstring."""
        return code_lines_at(self.files[self.path], self.bug.line)

    def line(self, files: Mapping[str, str]) -> str:
        """The line of the bug in ``files``; empty if they end before it."""
        lines = files[self.path].splitlines()
        return lines[self.bug.line - 1] if self.bug.line <= len(lines) else ""

    def touched(self, files: Mapping[str, str]) -> bool:
        """Whether ``files`` changed or left out the line of the bug; other lines may have come and
        gone."""
        broken, lines = (each[self.path].splitlines() for each in (self.files, files))
        if len(lines) > 2 * len(broken) + 100:  # no repair of one bug, and comparing takes long
            return False
        changes = SequenceMatcher(None, broken, lines, autojunk=False).get_opcodes()
        return any(kind != "equal" and first < self.bug.line <= last for kind, first, last, _, _ in changes)

    def question(self, show: str, edits: str = "text") -> str:
        """The question to the agent; ``show`` is one of `SHOWN`, ``edits`` one of `EDITS`."""
        library = self.library
        lines = [f"Library {library.name}: {', '.join(library.files)}; tests: {', '.join(library.tests)}."]
        if show != "files":
            name, said = next(iter(self.failing.items()))
            lines.append(f"{name} fails: {said}")
        if show == "function":
            lines += ["", self.function if edits == "text" else self.numbered_function]
        return "\n".join(lines)

    @property
    def repair(self) -> tuple[str, str] | None:
        """The line with the bug and without it, without indentation; None if it is not the only one
        with its text."""
        old, new = self.line(self.files).strip(), self.line(self.library.files).strip()
        return (old, new) if sum(text.count(old) for text in self.files.values()) == 1 else None

    def example(self, show: str, edits: str = "text") -> list[dict[str, str]]:
        """A worked repair: question, edit, answer. Needs `repair`."""
        assert self.repair is not None
        old, new = self.repair
        arguments: dict[str, str | int] = {"old": old, "new": new}
        if edits == "line":
            arguments = {"line": self.bug.line, **arguments}
        name = "edit" if edits == "text" else "edit_line"
        return [
            {"role": "user", "content": self.question(show, edits)},
            {
                "role": "assistant",
                "content": f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>",
            },
            {"role": "tool", "content": f"edited {self.path}"},
            {"role": "assistant", "content": "It is repaired."},
        ]


def numbered(text: str, first: int = 1) -> str:
    """Each line of a text after its number and a bar; ``first`` is the number of the first."""
    return "\n".join(f"{number}|{line}" for number, line in enumerate(text.splitlines(), first))


def read_tasks(path: Path, function_lines: int | None) -> list[Task]:
    """The tasks of a file whose `Task.code_lines` are at most ``function_lines``; ConfigError if it
    is none of tasks."""
    where = "environment.args.tasks"
    libraries: dict[str, Library] = {}
    tasks = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = parsed_json(line)
            if "files" in row:
                libraries[row["library"]] = Library(row["library"], row["files"], row["tests"], row["licence"])
                continue
            bug = Bug(row["kind"], row["line"], row["column"], row["old"], row["new"])
            task = Task(libraries[row["library"]], row["path"], bug, dict(row["failing"]), tuple(row["passing"]))
            if function_lines is None or task.code_lines <= function_lines:
                next(iter(task.failing))
                tasks.append(task)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError, StopIteration) as error:
        raise ConfigError(
            f"{where}: {path} is not a file of repair tasks ({type(error).__name__}: {error}); type {where}=shipped, or make one "
            "with python -m examples.repair.build --sdist PACKAGE.tar.gz --out FILE"
        ) from error
    return tasks
