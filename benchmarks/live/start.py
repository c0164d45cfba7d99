"""The start of the quick start and its end on Ctrl-C, each run as a real process under a
pseudo-terminal.

Figures
-------
``first_line_s``, ``first_generation_s``, ``first_step_s``: seconds from starting the command to its
first line, to the first generation that its event log has (of the evaluation before the first
step), and to the first optimizer step; medians of ``--runs``. ``ctrl_c_lines``: most lines on the
terminal after Ctrl-C: typed once and twice, during the start and in the run.
``event_bytes_per_trajectory``: bytes of the event log on the disk with its compressed segments, for
each trajectory that ended.

Beside the figures: ``stages_s``, the seconds of each stage of the start of the median run, and
``load``, the machine's load average before the first run: imports are most of the start, and a busy
core takes as much longer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.live.pseudo_terminal import Terminal, lines_after
from benchmarks.report import QUICKSTART, Figure, command_parser, emit
from libra.errors import LibraError

LIMIT_S = 600.0
NAME = "quick"


@dataclass(slots=True)
class Started:
    """One start: seconds, stages, and what the event log held at its end."""

    first_line_s: float
    first_generation_s: float
    first_step_s: float
    event_bytes: int
    num_trajectories: int
    ctrl_c_lines: int
    stages_s: dict[str, float] = field(default_factory=dict)


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


def log_size(run: Path) -> tuple[int, int]:
    """Bytes of a run's event log with its segments, and the trajectories that ended in it."""
    log, segments = run / "events.jsonl", sorted((run / "events").glob("*.gz"))
    texts = [gzip.decompress(path.read_bytes()) for path in segments] + [log.read_bytes()]
    events = (json.loads(line) for text in texts for line in text.splitlines())
    ended = {event["key"] for event in events if event["name"] == "trajectory_ended"}
    return sum(path.stat().st_size for path in [*segments, log]), len(ended)


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

        def when(event: str) -> float:
            process.wait_for(lambda: watched.has(event), LIMIT_S)
            return time.monotonic() - process.began_s

        generation_s, step_s = when("quantum_finished"), when("step_finished")
        before = process.text
        process.press_ctrl_c()
        process.wait(LIMIT_S)
        assert process.first_s is not None
        lines = len(lines_after(before, process.text))
    event_bytes, num_trajectories = log_size(directory / NAME)
    return Started(process.first_s, generation_s, step_s, event_bytes, num_trajectories, lines, stages_of(process.text))


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
    load, starts, lines = os.getloadavg()[0], list[Started](), dict[str, int]()
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="start-") as name:
            starts.append(one_start(Path(name)))
        told = starts[-1]
        print(
            f"start {number}: first line {told.first_line_s:.2f} s, generation {told.first_generation_s:.2f} s, step "
            f"{told.first_step_s:.2f} s; {told.stages_s}",
            flush=True,
        )
    for label, (moment, twice) in MOMENTS.items():
        with tempfile.TemporaryDirectory(prefix="start-") as name:
            lines[label] = interrupted(Path(name), moment, twice=twice)
        print(f"Ctrl-C, {label}: {lines[label]} lines", flush=True)
    median = sorted(starts, key=lambda told: told.first_generation_s)[len(starts) // 2]
    figures = {
        "first_line_s": Figure(statistics.median(told.first_line_s for told in starts), "s", "lower", 0.5),
        "first_generation_s": Figure(statistics.median(told.first_generation_s for told in starts), "s", "lower", 6.0),
        "first_step_s": Figure(statistics.median(told.first_step_s for told in starts), "s", "lower"),
        "ctrl_c_lines": Figure(max([told.ctrl_c_lines for told in starts] + list(lines.values())), "lines", "lower", 3),
        "event_bytes_per_trajectory": Figure(
            statistics.median(told.event_bytes / max(told.num_trajectories, 1) for told in starts), "bytes", "lower"
        ),
    }
    return figures, {"stages_s": median.stages_s, "load": round(load, 1)}


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("start", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="starts to measure (default 3)")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.runs < 1:
        raise LibraError(f"--runs: got {options.runs}; type 1 or more")
    figures, beside = measure(options.runs)
    emit("start", figures, arguments=arguments, as_json=options.json, beside=beside)
