"""The stages of a run's start with their seconds: one growing line on a terminal, else a line each.

It uses the standard library only, so that the first line does not wait for an import.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

STAGES: Final = {
    "libraries": "the driver's imports",
    "model": "checks of the model and the configuration; the run directory",
    "workers": "processes of a local cluster, or the connection to one",
    "engines": "engines, replicas and environments on the workers",
    "check": "records of earlier starts are restored, and the engines have the weights",
}


class StartStages:
    """A context manager that ends the last stage; ``enabled=False`` writes nothing."""

    def __init__(
        self, *, enabled: bool = True, stream: TextIO | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.enabled, self._stream, self._clock_s = enabled, stream or sys.stdout, clock_s
        self._stage, self._began_s, self._any = "", 0.0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(failed=kind is not None)

    def say(self, text: str) -> None:
        """A line of its own, at once."""
        if self.enabled:
            self._write(text + "\n")

    def begin(self, stage: str) -> None:
        """End the stage before, and begin this one of `STAGES`."""
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
