"""Has a run stopped making progress, and what is to blame? A pure object: whoever asks brings the time and the picture.

Rules
-----
1. Progress is an edge: a worker reported something of the run, a task of the run was completed, the driver asked for
   another iteration. Tasks that only start are none.
2. A stall is told when there was no edge for ``timeout_s``, and again after each further ``timeout_s`` without one. What
   was done about it (a worker restarted, a worker that joined) gets as long again to show in an edge.
3. Where tasks run, the culprit is the one that has given no sign of its own (sent to its worker, last report) the
   longest: what does not move waits for it, or for another one that is told next if the first was not to blame.
4. Where none runs, no worker is to blame but the scheduler's stage: the stall names what the parked tasks wait for.
5. A run without any task is idle, not stalled: its driver has asked for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task on a worker, with the time of its last own sign."""

    key: str
    stage: str
    worker: str
    address: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that waits in the scheduler for ``needs``: in words, and as a resource where it is one (else empty)."""

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
        None where nothing runs.
    held_s : float
        How long the culprit has given no sign; 0 without one.
    waiting : int
        Tasks that wait in the scheduler.
    missing : tuple of str
        Resources that are waited for and that no worker declares.
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
    """One per run; ``t_s`` is seconds of any one clock that never goes back."""

    def __init__(self, timeout_s: float, t_s: float) -> None:
        self.timeout_s = timeout_s
        self._edge_s = t_s
        self._told_s = t_s

    def progressed(self, t_s: float) -> None:
        """There was an edge."""
        self._edge_s = self._told_s = t_s

    def granted(self, t_s: float) -> None:
        """Something was done that may end a stall; it is told again after ``timeout_s`` from now, and not before."""
        self._told_s = max(self._told_s, t_s)

    def moved_since(self, t_s: float) -> bool:
        """Whether there was an edge after ``t_s``."""
        return self._edge_s > t_s

    def check(self, t_s: float, look: Callable[[], Picture]) -> Stall | None:
        """A stall that is to be told now; ``look`` is called only where one is due."""
        if t_s - self._told_s < self.timeout_s:
            return None
        picture = look()
        if not picture.running and not picture.waiting:
            self.progressed(t_s)
            return None
        self._told_s = t_s
        idle_s = t_s - self._edge_s
        if not picture.running:
            missing = tuple(
                sorted({w.resource for w in picture.waiting if w.resource and not picture.supply.get(w.resource)})
            )
            return Stall(idle_s, None, 0.0, len(picture.waiting), missing, _nothing_runs(picture, missing))
        culprit = min(picture.running, key=lambda task: (task.since_s, task.key))
        held_s = t_s - culprit.since_s
        detail = (
            f"{culprit.key} ({culprit.stage}) has been on worker {culprit.worker} at {culprit.address} for {held_s:.0f} s "
            f"without a sign; {len(picture.running) - 1} others run, {len(picture.waiting)} are parked"
        )
        return Stall(idle_s, culprit, held_s, len(picture.waiting), (), detail)


def _nothing_runs(picture: Picture, missing: tuple[str, ...]) -> str:
    counts = Counter((task.needs, task.resource) for task in picture.waiting)
    parts = [
        f"{count} for {needs}{', which no worker declares' if resource in missing else ''}"
        for (needs, resource), count in sorted(counts.items())
    ]
    return f"nothing runs, {len(picture.waiting)} are parked, waiting: {'; '.join(parts)}"
