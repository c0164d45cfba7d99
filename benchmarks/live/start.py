"""The start of the quick start and its end on Ctrl-C, each run as a real process under a
pseudo-terminal.

Figures
-------
``first_line_s``, ``first_generation_s``: seconds from starting the command to its first line, and to
the first generation that its event log has (of the evaluation before the first step); medians of
``--runs``. ``ctrl_c_lines``: most lines on the terminal after Ctrl-C: typed once and twice, during
the start and in the run. Beside the figures: ``stages_s``, the seconds of each stage of the start of
the median run.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.live.pseudo_terminal import Terminal, lines_after
from benchmarks.report import QUICKSTART, Figure, command_parser, emit
from libra.errors import LibraError

LIMIT_S = 600.0
NAME = "quick"


class Started(NamedTuple):
    """One start: seconds, lines after Ctrl-C, and stages."""

    first_line_s: float
    first_generation_s: float
    ctrl_c_lines: int
    stages_s: dict[str, float]


class Watched:
    """The newest lines of an event log while it is written: which events there were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.names: set[str] = set()

    def has(self, name: str) -> bool:
        if self._path.exists():
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._read:  # its older lines became a segment
                    self._read = 0
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self.names.add(json.loads(line)["name"])
        return name in self.names


def stages_of(text: str) -> dict[str, float]:
    line = re.search(r"^start: (.*)", text, re.MULTILINE)
    return {name: float(s) for name, s in re.findall(r"(\w+) ([\d.]+) s", line[1])} if line else {}


def started(directory: Path) -> Terminal:
    command = [sys.executable, "-m", "libra", "run", str(QUICKSTART), "run.dir=.", f"run.name={NAME}"]
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    return Terminal([*command, "cluster.dashboard_port=0"], directory, {"PYTHONPATH": path})


def one_start(directory: Path) -> Started:
    watched = Watched(directory / NAME / "events.jsonl")
    with started(directory) as process:
        process.wait_for(lambda: watched.has("quantum_finished"), LIMIT_S)
        generation_s = time.monotonic() - process.began_s
        process.wait_for(lambda: watched.has("step_finished"), LIMIT_S)
        before = process.text
        process.press_ctrl_c()
        process.wait(LIMIT_S)
        assert process.first_s is not None
        lines = len(lines_after(before, process.text))
    return Started(process.first_s, generation_s, lines, stages_of(process.text))


def interrupted(directory: Path, moment: Callable[[str], bool], *, twice: bool) -> int:
    with started(directory) as process:
        process.wait_for(lambda: moment(process.text), LIMIT_S)
        before = process.text
        process.press_ctrl_c()
        if twice:
            process.wait_for(lambda: "Ctrl-C again" in process.text, LIMIT_S)
            process.press_ctrl_c()
        process.wait(LIMIT_S)
        return len(lines_after(before, process.text))


MOMENTS: dict[str, tuple[Callable[[str], bool], bool]] = {
    "imports": (lambda text: "libraries" in text, False),
    "workers": (lambda text: "workers" in text, False),
    "run, twice": (lambda text: "watch them at" in text, True),
}
"""Moments of the output at which Ctrl-C is typed, and whether twice; `one_start` types it once."""


def measure(runs: int) -> tuple[dict[str, Figure], dict[str, object]]:
    starts, lines = list[Started](), list[int]()
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="start-") as name:
            starts.append(one_start(Path(name)))
        print(f"start {number}: {starts[-1]}", flush=True)
    for label, (moment, twice) in MOMENTS.items():
        with tempfile.TemporaryDirectory(prefix="start-") as name:
            lines.append(interrupted(Path(name), moment, twice=twice))
        print(f"Ctrl-C, {label}: {lines[-1]} lines", flush=True)
    median = sorted(starts, key=lambda told: told.first_generation_s)[len(starts) // 2]
    figures = {
        "first_line_s": Figure(statistics.median(told.first_line_s for told in starts), "s", "lower", 0.5),
        "first_generation_s": Figure(statistics.median(told.first_generation_s for told in starts), "s", "lower", 6.0),
        "ctrl_c_lines": Figure(max([told.ctrl_c_lines for told in starts] + lines), "lines", "lower", 3),
    }
    return figures, {"stages_s": median.stages_s}


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("start", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="starts to measure (default 3)")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        raise LibraError(f"--runs: got {options.runs}; type 1 or more")
    figures, beside = measure(options.runs)
    emit("start", figures, arguments=arguments, as_json=options.json, beside=beside)
