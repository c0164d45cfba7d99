"""Conversations about ``repair`` that its start model learns from: copying lines, then edits, most of them no repair of the task.

Code comes from Python's standard library. Of the run's own tasks only training questions are shown, and each with a line and a
change drawn at random among all that could have been the bug: what repairs them is left to reinforcement learning.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from demonstrations import MALFORMED, Messages, call, does, exchange, world_says

from examples.repair.bugs import ARITHMETIC, Bug, bugs_of, function_at
from examples.repair.software import SoftwareRepair
from examples.repair.tasks import numbered
from libra.envs.environment import Environment
from libra.errors import ConfigError

REPAIR_HABITS = {
    "skip": 0.06,  # says that it is repaired without an edit
    "other_change": 0.30,  # changes any line in any way
    "malformed": 0.04,  # writes a call that is no call, then tries again
}
OWN_SHARE = 0.5  # of demonstrations: a training question of the run
CODE_WORDS = (
    r'\{"name": "edit_line", "arguments": \{"line": |, "old": "|", "new": "|"\}\}|\\.|["\'|]|(?:assistant|user|system)\n'
    r"|[,:] | ?(?:[=!<>]=|//|\*\*|[-+*/%<>=]) ?| ?[A-Za-z_]+|[0-9]{1,3}|\n| +|[^\w\s]"
)
"""What tokens do not reach across: a line of code is the same tokens wherever it stands, and an operator is one of them."""
MOST_LINES, MOST_CHARS, LONGEST_FILE = 10, 70, 500


class Code(NamedTuple):
    """A function of the module ``library``, without its docstring, and the bugs that can be put in."""

    library: str
    name: str
    text: str
    bugs: list[Bug]


class Edit(NamedTuple):
    """The arguments of ``edit_line``."""

    line: int
    old: str
    new: str


class Copier:
    """Conversations in which a piece of every line of a function is copied, in any order, after the line's number."""

    def __init__(self, seed: int, args: dict[str, Any]) -> None:
        self.repair = made_for_lines(args, seed)
        self.environment: Environment = self.repair
        self.random = random.Random(f"copier/{seed}")

    def conversation(self, index: int) -> Messages:
        text = functions()[index % len(functions())].text
        first = line_number(self.random)
        lines = list(enumerate(text.splitlines(), first))
        calls = [self._copy(number, line) for number, line in self.random.sample(lines, len(lines)) if line.strip()]
        return [
            {"role": "user", "content": numbered(text, first)},
            {"role": "assistant", "content": "\n".join(calls)},
        ]

    def _copy(self, number: int, line: str) -> str:
        piece = self.random.choice([found for found in re.findall(CODE_WORDS, line) if found.strip()])
        return call("edit_line", line=number, old=piece, new=piece)


class Repairer:
    """Demonstrations of ``repair``: other code is repaired, the run's own training tasks are changed at random."""

    def __init__(self, seed: int, habits: dict[str, float], args: dict[str, Any]) -> None:
        self.repair = made_for_lines(args, seed)
        self.environment: Environment = self.repair
        self.habits, self.random = habits, random.Random(f"repairer/{seed}")
        self.code = [code for code in functions() if code.bugs]

    def conversation(self, index: int) -> Messages:
        own = self.random.random() < OWN_SHARE
        question, path, edit = self._own(index) if own else self._elsewhere()
        messages = [dict(self.repair.prompt("train", index).messages[0]), {"role": "user", "content": question}]
        if does(self, "malformed"):
            exchange(messages, MALFORMED % "edit_line", world_says(self.repair))
        if not does(self, "skip"):
            exchange(messages, call("edit_line", **edit._asdict()), f"edited {path}")
        return [*messages, {"role": "assistant", "content": "It is repaired."}]

    def _own(self, index: int) -> tuple[str, str, Edit]:
        """A training question of the run with any change."""
        prompt = self.repair.prompt("train", index)
        task = self.repair.tasks[prompt.facts["task"]]
        source = task.files[task.path]
        return prompt.messages[-1]["content"], task.path, self._any_edit(source, function_at(source, task.bug.line))

    def _elsewhere(self) -> tuple[str, str, Edit]:
        """A function of the standard library with a bug, a test that is made up, and its repair."""
        code = self.random.choice(self.code)
        bug = self.random.choice(code.bugs)
        broken = bug.put_in(code.text)
        first = line_number(self.random)
        library, test = code.library, line_number(self.random)
        question = (
            f"Library {library}: {library}.py; tests: test_{library}.py.\n"
            f"test_{library}.test_{code.name} fails: AssertionError:  "
            f"(test_{library}.py:{test}: assert {library}.{code.name}({self._value()}) == {self._value()})\n\n"
            f"{numbered(broken, first)}"
        )
        if does(self, "other_change"):
            edit = self._any_edit(broken, (1, len(broken.splitlines())))
        else:
            edit = edit_of(broken, bug._replace(old=bug.new, new=bug.old))
        return question, f"{library}.py", edit._replace(line=first + edit.line - 1)

    def _any_edit(self, source: str, within: tuple[int, int]) -> Edit:
        """Any change that could undo a bug in the lines from the first to the last ``within``; one of none where none could."""
        places = [bug for bug in guesses(source) if within[0] <= bug.line <= within[1]]
        if places:
            return edit_of(source, self.random.choice(places))
        line = self.random.randint(*within)
        piece = source.splitlines()[line - 1]
        return Edit(line, piece, piece)

    def _value(self) -> str:
        number = self.random.randint(0, 12)
        return self.random.choice([str(number), f"[{number}, {number + 3}]", '"ab"', '"Over"', "True", "[]", "None"])


def made_for_lines(args: dict[str, Any], seed: int) -> SoftwareRepair:
    """The environment; ConfigError if its edits are not by line numbers."""
    if args.get("edits") != "line":
        raise ConfigError(
            "environment.args.edits: the start model edits lines by number; type environment.args.edits=line"
        )
    return SoftwareRepair(**args, seed=seed)


def edit_of(source: str, change: Bug) -> Edit:
    """The edit that makes a change: of the whole words that it touches, and of as many before them as tell the place."""
    line = source.splitlines()[change.line - 1]
    words = [(found.start(), found.end()) for found in re.finditer(CODE_WORDS, line)]
    start = max(begin for begin, _ in words if begin <= change.column)
    end = min(last for _, last in words if last >= change.column + len(change.old))
    while line.index(line[start:end]) != start:
        start = max(begin for begin, _ in words if begin < start)
    new = line[start : change.column] + change.new + line[change.column + len(change.old) : end]
    return Edit(change.line, line[start:end], new)


@lru_cache(maxsize=512)
def guesses(source: str) -> list[Bug]:
    """Every change that could undo a bug of a source."""
    before = {new: [old for old, news in ARITHMETIC.items() if new in news] for new in ARITHMETIC}
    return [
        bug._replace(new=new)
        for bug in bugs_of(source)
        for new in (before[bug.old] if bug.kind == "arithmetic" else [bug.new])
    ]


def line_number(generator: random.Random) -> int:
    """A line's number in a file, a small one rather than a large one."""
    return 1 + int(LONGEST_FILE * generator.random() ** 3)


@lru_cache(maxsize=1)
def functions() -> list[Code]:
    """Short functions of the standard library's modules, without docstrings."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (text := _short(node, source.splitlines())):
                found.append(Code(path.stem, node.name, text, bugs_of(text)))
    return found


def _short(node: ast.FunctionDef, lines: list[str]) -> str:
    """The function's text without docstring and indentation; empty if it is long or nothing but one line."""
    kept = lines[node.lineno - 1 : node.end_lineno]
    if ast.get_docstring(node, clean=False) is not None:
        said = node.body[0]
        del kept[said.lineno - node.lineno : (said.end_lineno or said.lineno) - node.lineno + 1]
    text = textwrap.dedent("\n".join(kept)) + "\n"
    if not 2 <= len(kept) <= MOST_LINES or not text.isascii() or max(map(len, kept)) > MOST_CHARS or "\t" in text:
        return ""
    try:
        ast.parse(text)
    except SyntaxError:  # a body that was its docstring, or a text with lines of its own
        return ""
    return text
