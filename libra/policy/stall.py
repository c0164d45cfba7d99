"""Detects that a run makes no progress, and the task to blame. Pure: the caller provides the time and the tasks.

Rules
-----
1. Progress is a worker's report on the run, a completed task of the run, or the driver's request for another iteration. A task
   that only starts is none.
2. Each kind of task has a limit: ``FACTOR`` times the ``QUANTILE`` of its last ``KEPT`` lengths, at least its floor; ``START_S``
   if it was seen fewer than ``MIN_SEEN`` times, because first tasks load, compile and connect. A kind with a time-out of its own (a
   tool, a grader) has a floor above that. A stall is reported after the least of all limits without progress, if a task has been
   without a sign (sent to its worker, last report) for longer than its limit; else after the longest limit of those that run. Again
   after each further limit of that task. An action against it (a restart, a worker that joined) gets the same time to show
   progress.
3. If tasks run, the culprit is the one that has exceeded its limit by the largest factor: the others wait for it, or for another
   one, which is reported next if the first was not to blame.
4. If none runs, no worker is to blame: the stall names what the parked tasks wait for. The limit is the longest of the run's.
5. A run without any task is idle, not stalled.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task on a worker, with the time of its last sign of activity."""

    key: str
    stage: str
    worker: str
    address: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that waits in the scheduler for ``needs`` (in words), and for ``resource`` (empty: for none)."""

    key: str
    needs: str
    resource: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A run at one moment; ``supply`` counts declared units by resource."""

    running: tuple[RunningTask, ...]
    waiting: tuple[Waiting, ...]
    supply: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Stall:
    """No progress for ``idle_s``.

    Attributes
    ----------
    culprit : Running or None
        None if nothing runs.
    held_s : float
        Age of the culprit's last sign; 0 without a culprit.
    waiting : int
        Tasks that wait in the scheduler.
    missing : tuple of str
        Resources that tasks wait for and that no worker declares.
    detail : str
        The same in words.
    """

    idle_s: float
    culprit: RunningTask | None
    held_s: float
    waiting: int
    missing: tuple[str, ...]
    detail: str


class Watchdog:
    """One per run; ``t_s`` is in seconds of a monotonic clock."""

    def __init__(self, limits: Limits | float, t_s: float) -> None:
        self.limits: Limits = FixedLimit(limits) if isinstance(limits, int | float) else limits
        self._progress_s = t_s
        self._reported_s = t_s
        self._again = False  # something was reported, or done, since the last progress

    def progressed(self, t_s: float) -> None:
        """There was progress."""
        self._progress_s = self._reported_s = t_s
        self._again = False

    def granted(self, t_s: float) -> None:
        """Something was done that may end a stall; it is not reported before a limit from now."""
        self._reported_s, self._again = max(self._reported_s, t_s), True

    def moved_since(self, t_s: float) -> bool:
        """Whether there was progress after ``t_s``."""
        return self._progress_s > t_s

    def check(self, t_s: float, look: Callable[[], Picture]) -> Stall | None:
        """A stall to report now; ``look`` is called only if one is due."""
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
        idle_s = t_s - self._progress_s
        if not picture.running:
            missing = tuple(
                sorted({w.resource for w in picture.waiting if w.resource and not picture.supply.get(w.resource)})
            )
            return Stall(idle_s, None, 0.0, len(picture.waiting), missing, _nothing_runs(picture, missing))
        culprit = ordered[0]
        held_s = t_s - culprit.since_s
        detail = (
            f"{culprit.key} ({culprit.stage}) has been on worker {culprit.worker} at {culprit.address} for {held_s:.0f} s "
            f"without a sign, limit {limit_s[culprit.stage]:.0f} s; {len(picture.running) - 1} others run, "
            f"{len(picture.waiting)} are parked"
        )
        return Stall(idle_s, culprit, held_s, len(picture.waiting), (), detail)

    def _needed_s(self, worst: RunningTask | None, limit_s: Mapping[str, float], t_s: float) -> float:
        """Seconds without progress or action after which to report now; ``worst``: the task to blame, if one runs."""
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
