"""Detects that a run makes no progress, and the task to blame. Pure: the caller provides the time and the tasks.

Rules
-----
1. Progress is a worker's report on the run, a completed task of the run, or the driver's request for another iteration. A task
   that only starts is none.
2. Each kind of task has a limit (`libra.policy.step_lengths`). A stall is reported after the least of all limits without
   progress, if a task has been without a sign (sent to its worker, last report) for longer than its limit; else after the longest
   limit of those that run. Again after each further limit of that task. An action against it (a restart, a worker that joined)
   gets the same time to show progress.
3. If tasks run, the culprit is the one that has exceeded its limit by the largest factor: the others wait for it, or for another
   one, which is reported next if the first was not to blame.
4. If none runs, no worker is to blame: the stall names what the parked tasks wait for. The limit is the longest of the run's.
5. A run without any task is idle, not stalled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libra.policy.step_lengths import FixedLimit, Limits


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
