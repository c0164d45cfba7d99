"""Repair a small library: read its files, edit them, run its tests; other copies of its tests
decide, outside of the agent's reach.

Invariants
----------
1. The grader runs the tests of the task's file. The agent's edits reach library files only,
   and travel as the trajectory's state; every run of tests is a fresh sandbox, and the same files
   are graded once in a process.
2. A repair that breaks a test which passed has no reward beyond ``located``, and an edit that could
   fool the tests (`examples.repair.tampering`) has none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from examples.repair.library import failures, opened
from examples.repair.tampering import tampering
from examples.repair.tasks import EDITS, SHIPPED, SHOWN, Task, numbered, read_tasks
from libra.envs.environment import BIN, Environment
from libra.envs.sandbox import MEGABYTE, Limits, opener
from libra.envs.tool import tool
from libra.errors import ConfigError, one_of
from libra.types import Episode, Prompt

SYSTEM = "A Python library has one bug. Repair it with the tool %s, and check it with run_tests. Then reply with one sentence."
_FAILURES_SHOWN = 5
_MOST_VERDICTS = 4096
_HELD_OUT, _EXAMPLES = 0, 1
"""Classes of tasks: evaluation, and worked examples; the others are training, and so are examples
where none is shown."""


class SoftwareRepair(Environment):
    """In a configuration: ``examples.repair.software:SoftwareRepair``.

    Reward is 1.0 if all tests pass that pass without the bug, else 0.0. A hash of the bug decides
    its split: 1 in 8 is evaluation. Facts: ``library``, ``task`` (its number in the file). The bin
    of an evaluation is the kind of bug.

    Parameters
    ----------
    tasks : str
        A file that ``python -m examples.repair.build`` made, or "shipped". All workers must be able
        to read it.
    partial : bool
        Whether a repair after which some of the failing tests still fail has their share of the
        reward.
    located : float
        Reward, from 0 to 1, of changing the line with the bug without repairing it: something to
        begin with for small models.
    show : str
        Contents of the question: names of "files"; also the message of one failing test
        ("failure"); also the "function" with the bug.
    edits : str
        Place of an edit: "text" that occurs once (tool ``edit``), or by the number of a
        "line" and a piece of it (tool ``edit_line``; lines are shown with their numbers), which
        small models learn more easily.
    function_lines : int, optional
        Only bugs in functions of at most so many lines, without their docstring; all by default.
    examples : int
        Worked repairs before the question, as a conversation with calls. Small models need some.
    timeout_s : float
        Wall seconds of one run of the tests.
    memory_mb : int
        Address space of a process in the sandbox, 2**20 bytes each.
    isolation : str
        "bubblewrap", "none", or a function of yours (`libra.envs.sandbox`).

    Raises
    ------
    ConfigError
        For a file that is none of tasks, or has none that fits.
    """

    max_state_bytes = 2**20

    def __init__(
        self,
        *,
        tasks: str = "shipped",
        partial: bool = False,
        located: float = 0.0,
        show: str = "failure",
        edits: str = "text",
        function_lines: int | None = None,
        examples: int = 0,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        isolation: str = "bubblewrap",
        seed: int = 0,
    ) -> None:
        one_of("environment.args.show", show, SHOWN)
        one_of("environment.args.edits", edits, EDITS)
        for name, value, right, words in (
            ("located", located, 0.0 <= located < 1.0, "a reward of at least 0 and below 1"),
            ("examples", examples, examples >= 0, "0 or more"),
            ("timeout_s", timeout_s, timeout_s > 0, "above 0 seconds"),
            ("memory_mb", memory_mb, memory_mb >= 64, "at least 64"),
        ):
            if not right:
                raise ConfigError(f"environment.args.{name}: got {value!r}; {words}")
        self.tasks = read_tasks(SHIPPED if tasks == "shipped" else Path(tasks), function_lines)
        self.seed, self.partial, self.located, self.show, self.examples = seed, partial, located, show, examples
        self.edits, self._verdicts = edits, dict[bytes, dict[str, str]]()
        self._open = opener(isolation)
        self.isolation, self.timeout_s = isolation, timeout_s
        self.limits = Limits(memory_bytes=memory_mb * MEGABYTE, cpu_s=int(timeout_s) + 2)
        self._split(tasks)
        # The tool's own limit is above the sandbox's, so that its processes are killed and no thread hangs.
        self.tools = (
            tool(self.read, timeout_s=5.0),
            tool(self.edit if edits == "text" else self.edit_line, timeout_s=5.0),
            tool(self.run_tests, timeout_s=2 * timeout_s + 25.0),
        )

    def num_prompts(self, split: str) -> int:
        self.check_split(split)
        return len(self._of_split[split])

    def prompt_id(self, split: str, index: int) -> str:
        return f"train-{self._number('train', index)}" if split == "train" else ""

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        number = self._number(split, index)
        task = self.tasks[number]
        shown = [each for each in self._of_split["example"] if self.tasks[each].repair][: self.examples]
        messages = (
            {"role": "system", "content": SYSTEM % self.tools[1].name},
            *(message for each in shown for message in self.tasks[each].example(self.show, self.edits)),
            {"role": "user", "content": task.question(self.show, self.edits)},
        )
        return Prompt(f"{split}-{number}", messages, {"library": task.library.name, "task": number, BIN: task.bug.kind})

    def reset(self, prompt: Prompt) -> dict[str, Any]:
        """The number of the task, and the files that were edited, by path."""
        return {"task": prompt.facts["task"], "edited": {}}

    def read(self, trajectory_state: dict[str, Any], path: str = "") -> str:
        """Shows a file of the library or of its tests.

        Args:
            path: The file, e.g. "roman.py". Without one the files are listed.
        """
        texts = {**self._task(trajectory_state).library.tests, **self._files(trajectory_state)}
        if path and path not in texts:
            raise FileNotFoundError(f"no {path}; there are {', '.join(texts)}")
        if not path:
            return "\n".join(texts)
        return texts[path] if self.edits == "text" else numbered(texts[path])

    def edit(self, old: str, new: str, trajectory_state: dict[str, Any], path: str = "") -> str:
        """Replaces a piece of text in a file of the library.

        Args:
            old: The text to replace, as it is in the file; it must occur once.
            new: What comes in its place.
            path: The file. Without one, the file with the text.
        """
        files = self._files(trajectory_state)
        if path and path not in files:
            raise FileNotFoundError(f"no {path} that may be edited; there are {', '.join(files)}")
        counts = {name: text.count(old) if old else 0 for name, text in files.items() if path in ("", name)}
        if sum(counts.values()) != 1:
            raise ValueError(f"the text to replace occurs {sum(counts.values())} times; give one that occurs once")
        name = max(counts, key=lambda each: counts[each])
        trajectory_state["edited"][name] = files[name].replace(old, new)
        return f"edited {name}"

    def edit_line(self, line: int, old: str, new: str, trajectory_state: dict[str, Any], path: str = "") -> str:
        """Replaces a piece of one line in a file of the library.

        Args:
            line: The number of the line, as it is shown now.
            old: The piece to replace; where it is first in the line.
            new: What comes in its place.
            path: The file. Without one, the file of the function that the question shows, or the only file.
        """
        files = self._files(trajectory_state)
        if not path and (self.show == "function" or len(files) == 1):
            path = self._task(trajectory_state).path
        if path not in files:
            raise FileNotFoundError(f"no {path or 'path'} that may be edited; there are {', '.join(files)}")
        lines = files[path].splitlines(keepends=True)
        if not 1 <= line <= len(lines):
            raise ValueError(f"no line {line}; {path} has {len(lines)}")
        if not old or old not in lines[line - 1]:
            raise ValueError(f"{old!r} is not in line {line}, which is {lines[line - 1].strip()!r}")
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        trajectory_state["edited"][path] = "".join(lines)
        return f"edited {path}"

    def run_tests(self, trajectory_state: dict[str, Any]) -> str:
        """Runs the tests of the library."""
        said = self._run(trajectory_state)
        if not said:
            return f"the tests did not come to their end within {self.timeout_s:g} s"
        failed = {name: text for name, text in said.items() if text}
        lines = [f"{name}: {text}" for name, text in list(failed.items())[:_FAILURES_SHOWN]]
        return "\n".join([*lines, f"{len(said) - len(failed)} passed, {len(failed)} failed"])

    def grade(self, episode: Episode) -> float:
        task, files = self._task(episode.state), self._files(episode.state)
        if files == task.files or tampering(task.files, files) is not None:
            return 0.0
        said = self._verdict(episode.state)
        least = self.located if task.touched(files) else 0.0
        if any(said.get(name, "it did not run") for name in task.passing):
            return least
        share = sum(not said.get(name, "it did not run") for name in task.failing) / len(task.failing)
        return max(least, share if self.partial or share == 1.0 else 0.0)

    def _split(self, given: str) -> None:
        """Numbers of the tasks of each split, and of examples; ConfigError if there are none."""
        kinds = [task.split_class for task in self.tasks]
        spare = (_HELD_OUT, _EXAMPLES) if self.examples else (_HELD_OUT,)
        self._of_split = {
            "train": [number for number, kind in enumerate(kinds) if kind not in spare],
            "eval": [number for number, kind in enumerate(kinds) if kind == _HELD_OUT],
            "example": [number for number, kind in enumerate(kinds) if kind == _EXAMPLES],
        }
        for split in ("train", "eval"):
            if not self._of_split[split]:
                raise ConfigError(
                    f"environment.args.tasks: of {given}, {len(kinds)} bugs fit, and none of them is in the split {split!r}; make "
                    "more (python -m examples.repair.build), or type environment.args.function_lines=null"
                )

    def _number(self, split: str, index: int) -> int:
        numbers = self._of_split[split]
        turn, place = divmod(index, len(numbers))
        return numbers[_order(self.seed, turn, len(numbers))[place] if split == "train" else place]

    def _task(self, state: Mapping[str, Any]) -> Task:
        return self.tasks[state["task"]]

    def _files(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Library files as the agent sees them: with the bug, and with its edits."""
        return {**self._task(state).files, **state["edited"]}

    def _verdict(self, state: Mapping[str, Any]) -> dict[str, str]:
        """As `_run`; of files that this process has graded before, what was said then, if the tests
        came to their end."""
        key = sha256(json.dumps([state["task"], state["edited"]], sort_keys=True).encode()).digest()
        said = self._verdicts.get(key) or self._run(state)
        if said:
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = said
        return said

    def _run(self, state: Mapping[str, Any]) -> dict[str, str]:
        with opened(self._open, self.limits, "repair") as session:
            return failures(session, self._files(state), self._task(state).library.tests, self.timeout_s)


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, count: int) -> tuple[int, ...]:
    """The order of training tasks in pass ``turn`` over them."""
    order = list(range(count))
    random.Random(f"repair/{seed}/{turn}").shuffle(order)
    return tuple(order)
