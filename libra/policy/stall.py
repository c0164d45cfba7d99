"""Detects that a run makes no progress, and the task to blame.

Invariants
----------
1. Progress is a worker's report on the run, a completed task, or the driver's request for another
   iteration; the start of a task is not. A run without tasks is idle, not stalled.
2. A task's limit is ``FACTOR`` times the ``QUANTILE`` of the last ``KEPT`` durations of its kind,
   but not below its floor. Kinds seen fewer than ``MIN_SEEN`` times have ``START_S``: first tasks
   load, compile and connect. The floor of a tool or grader is its time-out.
3. Once no progress lasts for the smallest limit, a stall is reported if a task has been inactive
   beyond its own limit, and otherwise after the longest limit of the running tasks. The report
   repeats after each further limit of the culprit; an action against it gets the same time.
4. If tasks run, the culprit exceeds its limit by the largest factor.
5. If no task runs, the stall names what parked tasks wait for, after the run's longest limit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

FACTOR = 10.0
QUANTILE = 0.95
KEPT = 200
MIN_SEEN = 3
FLOOR_S = 60.0
START_S = 600.0


class RunningTask(NamedTuple):
    """A task on a worker, with the time of its last activity."""

    key: str
    stage: str
    worker: str
    address: str
    since_s: float


class Waiting(NamedTuple):
    """A task that waits for ``needs`` (in words), and for ``resource`` (may be empty)."""

    key: str
    needs: str
    resource: str


class Picture(NamedTuple):
    """A run at one moment; ``supply`` counts declared units by resource."""

    running: tuple[RunningTask, ...]
    waiting: tuple[Waiting, ...]
    supply: Mapping[str, float]


class Stall(NamedTuple):
    """No progress for ``idle_s``; ``detail`` describes it in words."""

    idle_s: float
    culprit: RunningTask | None  # None if nothing runs
    held_s: float  # since the culprit's last activity
    waiting: int  # tasks in the scheduler
    missing: tuple[str, ...]  # resources that tasks wait for and no worker declares
    detail: str


class Watchdog:
    """The watchdog of a run; ``t_s`` is in seconds of a monotonic clock."""

    def __init__(self, limits: Limits, t_s: float) -> None:
        self.limits = limits
        self.progress_s = t_s
        self._reported_s = t_s
        self._again = False  # something was reported, or done, since the last progress

    def progressed(self, t_s: float) -> None:
        self.progress_s = self._reported_s = t_s
        self._again = False

    def granted(self, t_s: float) -> None:
        """An action may end a stall; no report follows before a limit from now."""
        self._reported_s, self._again = max(self._reported_s, t_s), True

    def check(self, t_s: float, look: Callable[[], Picture]) -> Stall | None:
        """A stall to report now; ``look`` is called only if a report may be due."""
        since_s = t_s - self._reported_s
        if since_s < self.limits.floor_s:
            return None
        picture = look()
        if not picture.running and not picture.waiting:
            self.progressed(t_s)
            return None
        limit_s = {task.stage: self.limits.limit_s(task.stage) for task in picture.running}
        ordered = sorted(picture.running, key=lambda task: ((task.since_s - t_s) / limit_s[task.stage], task.key))
        if since_s < self._needed_s(ordered[0] if ordered else None, limit_s, t_s):
            return None
        self._reported_s, self._again = t_s, True
        idle_s = t_s - self.progress_s
        culprit, missing, held_s = ordered[0] if ordered else None, tuple[str, ...](), 0.0
        if culprit is None:
            wanted = {task.resource for task in picture.waiting if task.resource}
            missing = tuple(sorted(name for name in wanted if not picture.supply.get(name)))
            detail = _nothing_runs(picture, missing)
        else:
            held_s = t_s - culprit.since_s
            detail = (
                f"{culprit.key} ({culprit.stage}) has been on worker {culprit.worker} at {culprit.address} for {held_s:.0f} s "
                f"without activity, limit {limit_s[culprit.stage]:.0f} s; {len(ordered) - 1} others run, "
                f"{len(picture.waiting)} are parked"
            )
        return Stall(idle_s, culprit, held_s, len(picture.waiting), missing, detail)

    def _needed_s(self, worst: RunningTask | None, limit_s: Mapping[str, float], t_s: float) -> float:
        if worst is None:
            return self.limits.longest_s()
        if t_s - worst.since_s < limit_s[worst.stage]:
            return max(limit_s.values())
        return limit_s[worst.stage] if self._again else self.limits.floor_s


def _nothing_runs(picture: Picture, missing: tuple[str, ...]) -> str:
    counts = Counter((task.needs, task.resource) for task in picture.waiting)
    parts = [
        f"{count} for {needs}{', which no worker declares' if resource in missing else ''}"
        for (needs, resource), count in sorted(counts.items())
    ]
    return f"nothing runs, {len(picture.waiting)} are parked, waiting: {'; '.join(parts)}"


class Limits:
    """Seconds of inactivity after which a task is suspicious, by kind or ``fixed_s``."""

    def __init__(self, floors_s: Mapping[str, float] | None = None, *, fixed_s: float | None = None) -> None:
        self._floors_s, self._fixed_s = dict(floors_s or {}), fixed_s
        self._seen: dict[str, deque[float]] = {}
        self.floor_s = FLOOR_S if fixed_s is None else fixed_s

    def took(self, kind: str, seconds: float) -> None:
        """A task took ``seconds`` on a worker until it ended or showed activity."""
        self._seen.setdefault(kind, deque(maxlen=KEPT)).append(seconds)

    def limit_s(self, kind: str) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        seen, floor_s = self._seen.get(kind, ()), self._floors_s.get(kind, FLOOR_S)
        if len(seen) < MIN_SEEN:
            return max(START_S, floor_s)
        ordered = sorted(seen)
        return max(floor_s, FACTOR * ordered[math.ceil(QUANTILE * len(ordered)) - 1])

    def longest_s(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        return max(map(self.limit_s, self._seen), default=START_S)
