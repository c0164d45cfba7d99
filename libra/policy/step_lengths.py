"""Measured lengths of tasks by kind, and the limit above which a task is suspicious. Pure: the caller measures.

Rules
-----
1. A kind's limit is ``FACTOR`` times the ``QUANTILE`` of its last ``KEPT`` lengths, at least its floor.
2. A kind that was seen fewer than ``MIN_SEEN`` times has ``START_S``: first tasks load, compile and connect.
3. A kind with a time-out of its own (a tool, a grader) has a floor above that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Protocol

FACTOR = 10.0
QUANTILE = 0.95
KEPT = 200
MIN_SEEN = 3
FLOOR_S = 60.0
START_S = 600.0


class Limits(Protocol):
    """Seconds after which a task without a sign of activity is suspicious."""

    @property
    def floor_s(self) -> float:
        """The least of all limits."""

    def limit_s(self, kind: str) -> float:
        """For tasks of this kind."""

    def longest_s(self) -> float:
        """The longest of all kinds: for a run in which nothing is on a worker."""


class FixedLimit:
    """The same limit for every kind: ``watchdog.timeout_s`` where it is a number."""

    def __init__(self, timeout_s: float) -> None:
        self.floor_s = timeout_s

    def limit_s(self, kind: str) -> float:
        """See `Limits`."""
        return self.floor_s

    def longest_s(self) -> float:
        """See `Limits`."""
        return self.floor_s


class StepLengths:
    """Limits that follow the measured lengths; ``floors_s`` are those of kinds with a time-out of their own.

    >>> lengths = StepLengths({"tool": 90.0})
    >>> lengths.limit_s("step")
    600.0
    >>> for seconds in (20.0, 21.0, 22.0, 0.1):
    ...     lengths.took("step", seconds)
    ...     lengths.took("tool", seconds / 10)
    >>> lengths.limit_s("step"), lengths.limit_s("tool"), lengths.longest_s()
    (220.0, 90.0, 220.0)
    """

    floor_s = FLOOR_S

    def __init__(self, floors_s: Mapping[str, float] | None = None) -> None:
        self._floors_s = dict(floors_s or {})
        self._seen: dict[str, deque[float]] = {}

    def took(self, kind: str, seconds: float) -> None:
        """A task of this kind took this long on a worker until it ended, or until its next sign of activity."""
        self._seen.setdefault(kind, deque(maxlen=KEPT)).append(seconds)

    def limit_s(self, kind: str) -> float:
        """See `Limits`."""
        seen, floor_s = self._seen.get(kind, ()), self._floors_s.get(kind, FLOOR_S)
        if len(seen) < MIN_SEEN:
            return max(START_S, floor_s)
        ordered = sorted(seen)
        return max(floor_s, FACTOR * ordered[math.ceil(QUANTILE * len(ordered)) - 1])

    def longest_s(self) -> float:
        """See `Limits`."""
        return max(map(self.limit_s, self._seen), default=START_S)
