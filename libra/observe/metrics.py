"""Metrics of a run by step: ``metrics.jsonl`` in the run directory, and trackers (`libra.observe.trackers`).

1. A step's line is on disk when `MetricsLog.write` returns; the JSON lines are the record, trackers have views of it.
2. Every line holds ``step``, ``wall_time_s`` (seconds since the Unix epoch) and the values; NaN and infinity are null.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from libra.errors import StoreError
from libra.observe.trackers import Trackers
from libra.store.line_log import LineLog, read_lines

_RESERVED = ("step", "wall_time_s")


class MetricsLog:
    """The writer of a run's metrics, one per run.

    Parameters
    ----------
    run_dir : Path
        Directory of ``metrics.jsonl``, which is appended to.
    trackers : Trackers, optional
        Get the same numbers; closed with this log.
    clock : callable
        Seconds since the Unix epoch.
    """

    def __init__(
        self, run_dir: str | Path, trackers: Trackers | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._lines = LineLog(Path(run_dir) / "metrics.jsonl", buffer_lines=1)
        self.trackers = trackers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one step; StoreError if a value is not a number, or its name is reserved."""
        wall_time_s = self._clock()
        line: dict[str, Any] = {"step": step, "wall_time_s": wall_time_s}
        numbers = {}
        for name, value in values.items():
            if name in _RESERVED:
                raise StoreError(f"metric {name!r}: the names {', '.join(_RESERVED)} are reserved")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as error:
                raise StoreError(f"metric {name!r} of step {step}: got {value!r}; allowed is one number") from error
            whole = isinstance(value, int) and not isinstance(value, bool)
            line[name] = value if whole else numbers[name] if math.isfinite(numbers[name]) else None
        self._lines.write_line(json.dumps(line, allow_nan=False))
        if self.trackers is not None:
            self.trackers.numbers(step, wall_time_s, numbers)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self.trackers is not None:
            self.trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics in order; a torn last line is skipped with a warning.

    StoreError if the run has no metrics, or a line but the last is damaged.
    """
    return read_lines(Path(run_dir) / "metrics.jsonl")
