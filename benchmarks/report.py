"""What all benchmarks share: command line, figures, and the comparison of two sides in pairs.

The last line of a benchmark is one JSON object::

    {"benchmark": NAME, "figures": {figure: {"value": x, "unit": "...", "better": "higher|lower", "goal": y}},
     "command": "...", "machine": "..."}

Two sides are compared in pairs within one run, A B A B ...: the speed of a shared machine drifts by more than the differences of
interest, and both sides of a pair see the same drift.

Invariants
----------
1. Every value and goal is a finite number, so that the line is JSON everywhere (NaN is not).
2. A comparison rests on at least ``MIN_PAIRS`` pairs, and its ratio is the median of the pairs' own ratios.
3. The machine's description names no host, user or path.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from libra.errors import ConfigError

MIN_PAIRS = 5
"""Fewest pairs of a comparison; below it a median of ratios is one lucky pair."""
DATA = Path(__file__).parent / "data"
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and whether higher or lower is better.

    Attributes
    ----------
    value : float
        Finite.
    unit : str
        ``"ratio"``, ``"us"``, ``"tokens"``, ...
    better : "higher" or "lower"
    goal : float or None
        The value to reach; None: the figure is only reported.

    Raises
    ------
    ValueError
        A number is not finite, or ``better`` is another word.
    """

    value: float
    unit: str
    better: Literal["higher", "lower"]
    goal: float | None = None

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ValueError(f"Figure.better: got {self.better!r}; allowed are 'higher' and 'lower'")
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

    Attributes
    ----------
    first, second : tuple of float
        Same length; entry i of both belongs to pair i.
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
    """The value of ``--pairs``, refused before anything starts."""
    if int(text) < MIN_PAIRS:
        raise argparse.ArgumentTypeError(str(_too_few(int(text))))
    return int(text)


def _too_few(pairs: int) -> ConfigError:
    return ConfigError(
        f"pairs: got {pairs}; a comparison rests on at least {MIN_PAIRS} pairs, type --pairs {MIN_PAIRS}"
    )


def alternate(
    first: Callable[[], float],
    second: Callable[[], float],
    *,
    pairs: int,
    after_pair: Callable[[int, float, float], None] | None = None,
) -> Pairs:
    """Measure two sides in turns: first, second, first, second, ...

    Parameters
    ----------
    first, second : callable
        Does its side's work once and returns the measured quantity; it leaves nothing busy.
    pairs : int
        At least ``MIN_PAIRS``, checked first.
    after_pair : callable, optional
        Called with (pair index, first, second), e.g. to show progress.

    Raises
    ------
    ConfigError
        Too few pairs.
    """
    if pairs < MIN_PAIRS:
        raise _too_few(pairs)
    firsts: list[float] = []
    seconds: list[float] = []
    for index in range(pairs):
        firsts.append(first())
        seconds.append(second())
        if after_pair is not None:
            after_pair(index, firsts[-1], seconds[-1])
    return Pairs(tuple(firsts), tuple(seconds))


def machine() -> str:
    """The machine in words, without host and path: available cores, CPU model, memory, versions of Python and torch."""
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
    """A field of this process's status in bytes (Linux): ``VmRSS`` is resident now, ``VmHWM`` the most that was.

    Not getrusage's maximum: after a fork that begins at the parent's.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def command_parser(
    benchmark: str, doc: str | None, *, pairs: int | None = None, data: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks share: ``--json``, and ``--pairs`` (with this default) and ``--data`` where wanted."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    if pairs is not None:
        parser.add_argument(
            "--pairs", type=_enough_pairs, default=pairs, help=f"at least {MIN_PAIRS} (default {pairs})"
        )
    if data:
        parser.add_argument("--data", type=Path, default=DATA, help="directory with agent_turns/*.csv")
    return parser


def command_line(benchmark: str, arguments: Sequence[str]) -> str:
    """The command, e.g. ``python -m benchmarks.vs_trl --json``."""
    return shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments])


def emit(
    benchmark: str,
    figures: Mapping[str, Figure],
    *,
    arguments: Sequence[str] | None = None,
    as_json: bool,
    stream: TextIO | None = None,
    beside: Mapping[str, object] | None = None,
) -> None:
    """Print the figures, one readable line each, and with ``as_json`` the JSON object as the last line.

    Parameters
    ----------
    benchmark : str
        Module name inside ``benchmarks``.
    figures : mapping of name to Figure
    arguments : sequence of str, optional
        Command-line arguments; None: those of this process.
    as_json : bool
    stream : text stream, optional
        None is standard output.
    beside : mapping, optional
        Further keys of the JSON object.
    """
    out = sys.stdout if stream is None else stream
    for name, figure in figures.items():
        goal = "" if figure.goal is None else f" (goal {figure.goal:g}, {'reached' if figure.reached else 'missed'})"
        print(f"{benchmark}.{name} = {figure.value:.4g} {figure.unit}, {figure.better} is better{goal}", file=out)
    if as_json:
        report = {
            "benchmark": benchmark,
            "figures": {
                name: {"value": figure.value, "unit": figure.unit, "better": figure.better, "goal": figure.goal}
                for name, figure in figures.items()
            },
            "command": command_line(benchmark, sys.argv[1:] if arguments is None else arguments),
            "machine": machine(),
            **(beside or {}),
        }
        print(json.dumps(report, allow_nan=False), file=out, flush=True)
