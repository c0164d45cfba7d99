"""Shared by all benchmarks: command line, figures, comparison in pairs, quiet settings, saved results.

The last line of ``python -m benchmarks NAME --json`` is one JSON object::

    {"benchmark": NAME, "command": "...", "machine": "...", "load": [at the start, at the end],
     "figures": {figure: {"value": x, "unit": "...", "better": "higher|lower", "goal": y}}}

With ``--save`` it is also ``benchmarks/results/NAME.json``, with date, commit and whether nothing
else ran; `benchmarks.page` makes docs/benchmarks.md of these files. Two sides are compared in pairs
within one run, A B A B ...: the speed of a shared machine drifts by more than the differences of
interest, and both sides of a pair see the same drift.

1. Every value and goal is a finite number, so that the line is JSON everywhere.
2. A comparison rests on at least ``MIN_PAIRS`` pairs, and its ratio is the median of the pairs' own
   ratios.
3. The machine's description names no host, user or path.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from libra.errors import ConfigError

MIN_PAIRS = 5
"""Fewest pairs of a comparison; below it a median of ratios is one lucky pair."""
DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results"
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
QUIET = (
    "cluster.dashboard_port=0", "observe.progress=false", "observe.trackers=[]", "evaluation.prompts=0",
    "checkpoint.every=0",
)  # fmt: skip
"""Settings of a run that is measured: nothing beside the work."""
QUIET_LOAD = 1.0
"""Load average at the start from which on another program runs."""
_LOAD_AT_START = os.getloadavg()[0]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; without ``goal`` it is only reported. ValueError if one is not finite."""

    value: float
    unit: str
    better: Literal["higher", "lower"]
    goal: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), ("goal", self.goal)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"Figure.{name}: got {number}; a figure is a finite number")

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds (or another positive quantity) of two sides, measured in turns.

    Entry i of both belongs to pair i.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.first) != len(self.second):
            raise ValueError(f"Pairs: {len(self.first)} values of the first side, {len(self.second)} of the second")
        if len(self.first) < MIN_PAIRS:
            raise _too_few(len(self.first))
        for value in (*self.first, *self.second):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Pairs: got {value}; a measured side is a positive finite number")

    @property
    def ratios(self) -> tuple[float, ...]:
        """first / second of each pair."""
        return tuple(a / b for a, b in zip(self.first, self.second, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios; the ratio of the two medians would mix different moments."""
        return statistics.median(self.ratios)

    @property
    def medians(self) -> tuple[float, float]:
        """Median of each side."""
        return statistics.median(self.first), statistics.median(self.second)


def _enough_pairs(text: str) -> int:
    if int(text) < MIN_PAIRS:
        raise argparse.ArgumentTypeError(str(_too_few(int(text))))
    return int(text)


def _too_few(pairs: int) -> ConfigError:
    return ConfigError(
        f"pairs: got {pairs}; a comparison rests on at least {MIN_PAIRS} pairs, type --pairs {MIN_PAIRS}"
    )


def alternate(first: Callable[[], float], second: Callable[[], float], *, pairs: int) -> Pairs:
    """Measure two sides in turns (first, second, first, second, ...), and print each pair.

    A side does its work once, returns the measured quantity, and leaves nothing busy. ConfigError
    for fewer than ``MIN_PAIRS`` pairs.
    """
    if pairs < MIN_PAIRS:
        raise _too_few(pairs)
    found = []
    for number in range(1, pairs + 1):
        found.append((first(), second()))
        one, other = found[-1]
        print(f"pair {number}: {one:.4g} and {other:.4g}, ratio {one / other:.3f}", flush=True)
    firsts, seconds = zip(*found, strict=True)
    return Pairs(firsts, seconds)


def gap_se(first: Sequence[float], second: Sequence[float]) -> float:
    """Mean of ``first`` minus mean of ``second``, in standard errors of the difference."""
    gap = statistics.fmean(first) - statistics.fmean(second)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return gap / max(error, 1e-9)


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds that ``work`` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def machine() -> str:
    """Available cores, CPU model, memory, versions of Python and torch; no host and no path."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch = importlib.metadata.version("torch")
    return (
        f"{cores} cores, {_cpu_model()}, {memory_bytes / 2**30:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch}"
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def status_bytes(field: str) -> int:
    """A field of this process's status in bytes (Linux): ``VmRSS`` is resident now."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def command_parser(
    benchmark: str, doc: str | None, *, pairs: int | None = None, data: bool = False
) -> argparse.ArgumentParser:
    """The common options; ``--pairs`` (with this default) and ``--data`` on request."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    parser.add_argument("--save", action="store_true", help="and write it to benchmarks/results, with date and commit")
    if pairs is not None:
        parser.add_argument(
            "--pairs", type=_enough_pairs, default=pairs, help=f"at least {MIN_PAIRS} (default {pairs})"
        )
    if data:
        parser.add_argument("--data", type=Path, default=DATA, help="directory with agent_turns/*.csv")
    return parser


def emit(
    benchmark: str,
    figures: Mapping[str, Figure],
    *,
    arguments: Sequence[str] | None = None,
    as_json: bool,
    stream: TextIO | None = None,
    beside: Mapping[str, object] | None = None,
) -> None:
    """Print one readable line per figure, with ``as_json`` the JSON object last; ``--save`` saves it.

    ``arguments`` default to the command line of this process; ``beside`` are further keys of the
    object.
    """
    out = sys.stdout if stream is None else stream
    given = list(sys.argv[1:] if arguments is None else arguments)
    for name, figure in figures.items():
        goal = "" if figure.goal is None else f" (goal {figure.goal:g}, {'reached' if figure.reached else 'missed'})"
        print(f"{benchmark}.{name} = {figure.value:.4g} {figure.unit}, {figure.better} is better{goal}", file=out)
    report = {
        "benchmark": benchmark, "figures": {name: asdict(figure) for name, figure in figures.items()},
        "command": shlex.join(["python", "-m", "benchmarks", benchmark, *(each for each in given if each != "--save")]),
        "machine": machine(), "load": [round(_LOAD_AT_START, 2), round(os.getloadavg()[0], 2)], **(beside or {}),
    }  # fmt: skip
    if "--save" in given:
        save(report)
    if as_json:
        print(json.dumps(report, allow_nan=False), file=out, flush=True)


def save(report: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write a report; ``quiet`` if nothing else ran at its start, or time is virtual."""
    from benchmarks import BENCHMARKS, UNTIMED

    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".."], capture_output=True).returncode
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    quiet = BENCHMARKS.get(report["benchmark"]) in UNTIMED or report["load"][0] < QUIET_LOAD
    about = {"date": today, "commit": commit + ("+changes" if dirty else ""), "quiet": quiet}
    path = directory / f"{report['benchmark']}.json"
    path.write_text(json.dumps({**report, **about}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
