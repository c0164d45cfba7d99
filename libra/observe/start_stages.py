"""The stages of a run's start with their seconds: one growing line on a terminal, else a line each.

It uses the standard library only, so that the first line does not wait for an import.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

STAGES: Final = {
    "libraries": "the driver's imports",
    "model": "checks of the model and the configuration; the run directory",
    "workers": "processes of a local cluster, or the connection to one",
    "engines": "engines, replicas and environments on the workers",
    "check": "what earlier starts left is restored, and the engines have the weights",
}


class StartStages:
    """A context manager that ends the last stage; ``enabled=False`` writes nothing."""

    def __init__(
        self, *, enabled: bool = True, stream: TextIO | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.enabled = enabled
        self._stream = stream or sys.stdout
        self._clock_s = clock_s
        self._stage = ""
        self._began_s = 0.0
        self._any = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(failed=kind is not None)

    def say(self, text: str) -> None:
        """A line of its own, at once."""
        if self.enabled:
            self._write(text + "\n")

    def begin(self, stage: str) -> None:
        """The stage before has ended, and this one of `STAGES` begins."""
        self._end_stage()
        if self.enabled and self._stream.isatty():
            self._write(f"{', ' if self._any else 'start: '}{stage}")
        self._stage, self._began_s, self._any = stage, self._clock_s(), True

    def end(self, *, failed: bool = False) -> None:
        """The last stage has ended."""
        if not failed:
            self._end_stage()
        if self.enabled and self._any and self._stream.isatty():
            self._write("\n")
        self._stage, self._any = "", False

    def _end_stage(self) -> None:
        if self.enabled and self._stage:
            seconds = f"{self._clock_s() - self._began_s:.1f} s"
            self._write(f" {seconds}" if self._stream.isatty() else f"start: {self._stage} {seconds}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
