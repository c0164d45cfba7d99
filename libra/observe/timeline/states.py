"""Worker states with the seconds in each, and the slots that trajectories have or await.

1. Segments of a `WorkerClock` are in time order without gaps; folding changes no total.
2. A trajectory has at most one slot and awaits at most one; counts by phase and level agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from libra.types import Phase

Kind = Literal["engine", "trainer", "tools"]

BUSY: Final[Mapping[str, str]] = {
    "generating": "generates",
    "acting": "runs tools",
    "training": "trains",
    "turned": "trains in a wave, as an engine that switched roles",
    "moving": "publishes, loads or checks weights",
}
IDLE: Final[Mapping[str, str]] = {
    "starting": "starts: process, model, first weights",
    "version": "waits for the next weights: the staleness bound, or a due evaluation",
    "trajectories": "training waits for the trajectories of its batch",
    "grading": "the last trajectories of the batch are graded and committed",
    "batch": "the batch is read and sent to the training workers",
    "tail": "no trajectory waits; the last ones are on other engines",
    "tools": "all open trajectories run tools",
    "dispatch": "a trajectory waits: it is about to be sent, or needs KV memory or another worker",
    "no_calls": "no tool call waits",
    "evaluation": "training waits while held-out questions are answered",
    "turning": "an engine that the tail does not need switches to training",
    "wave": "has switched to training, and no wave needs it now",
    "returning": "has trained, and switches back to rollout",
    "role": "switches roles for another reason",
    "lost": "the training group lost a member and re-forms",
    "quarantined": "failed the version check",
    "lent": "its GPU belongs to another worker's engine",
    "nothing": "nothing is submitted: the driver prepares, or the run is about to end",
}
"""Idle states and their causes as text."""
STATES: Final[Mapping[str, str]] = {**BUSY, **IDLE}
AWAY: Final = ""
"""State of an absent worker, whose time counts nowhere."""


class Segment(NamedTuple):
    """A state until the next segment's start; ``gpus`` is the worker's GPU count meanwhile."""

    start_s: float
    state: str
    gpus: int


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of time by state, summing to 1; empty without time."""
    total = sum(seconds.values())
    return {state: value / total for state, value in seconds.items()} if total > 0 else {}


def busy_frac(seconds: Mapping[str, float]) -> float | None:
    """Share of time in busy states; None without time."""
    shares = shares_of(seconds)
    return sum(value for state, value in shares.items() if state in BUSY) if shares else None


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """Seconds and GPU-seconds of one worker by state (worker-seconds on a CPU).

    ``slots_used_frac`` is the mean share of slots in use; None without slots.
    """

    worker: str
    kind: Kind
    seconds: Mapping[str, float]
    gpu_s: Mapping[str, float]
    slots_used_frac: float | None

    @property
    def total_s(self) -> float:
        """Seconds of the worker's presence."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Share of the worker's time by state."""
        return shares_of(self.seconds)


@dataclass(frozen=True, slots=True)
class RunTime:
    """All workers of a run, between ``since_s`` and ``until_s`` of the log."""

    workers: tuple[WorkerTime, ...]
    since_s: float
    until_s: float

    @property
    def gpu_s(self) -> dict[str, float]:
        """GPU-seconds by state of engines and training workers; pure tool workers are left out."""
        total: Counter[str] = Counter()
        for worker in self.workers:
            if worker.kind != "tools":
                total.update(worker.gpu_s)
        return {state: total[state] for state in STATES if total[state] > 0}

    @property
    def shares(self) -> dict[str, float]:
        """Share of `gpu_s` by state."""
        return shares_of(self.gpu_s)

    @property
    def busy_frac(self) -> float | None:
        """Share of `gpu_s` in busy states; None without time."""
        return busy_frac(self.gpu_s)


def _start_of(segment: Segment) -> float:
    return segment.start_s


@dataclass(slots=True)
class WorkerClock:
    """Time of one worker; ``folded`` and ``folded_gpu`` are totals of dropped segments."""

    kind: Kind
    segments: list[Segment] = field(default_factory=list)
    folded: Counter[str] = field(default_factory=Counter)
    folded_gpu: Counter[str] = field(default_factory=Counter)
    gpus: int = 1
    running: int = 0
    acting: int = 0
    num_slots: int = 0
    slot_s: float = 0.0
    room_s: float = 0.0
    slot_at_s: float = 0.0
    served: bool = False
    away: bool = False
    quarantined: bool = False
    changing: str = ""  # state during a role change
    hybrid: bool = False  # an engine that switches, or has switched, to training for the open step
    ready_s: float = math.inf  # since when it has the weights for computing waves
    lent: bool = False

    def enter(self, t_s: float, state: str) -> None:
        """Enter ``state`` at ``t_s``."""
        last = self.segments[-1] if self.segments else None
        if last is not None and last.state == state and last.gpus == self.gpus:
            return
        if last is not None and last.start_s >= t_s:
            t_s = last.start_s
            self.segments.pop()
        self.segments.append(Segment(t_s, state, self.gpus))

    def relabel(self, start_s: float, stop_s: float, state: str, but: Collection[str]) -> None:
        """Set the state between two times, except in folded segments and in states of ``but``."""
        if not self.segments or stop_s <= start_s:
            return
        first, stop = self._cut(start_s), self._cut(stop_s)
        rest, self.segments[max(first - 1, 0) :] = self.segments[max(first - 1, 0) :], []
        for index, segment in enumerate(rest, max(first - 1, 0)):
            if first <= index < stop and segment.state != AWAY and segment.state not in but:
                segment = segment._replace(state=state)
            if not self.segments or self.segments[-1][1:] != segment[1:]:
                self.segments.append(segment)

    def _cut(self, t_s: float) -> int:
        index = bisect_left(self.segments, t_s, key=_start_of)
        if index and (index == len(self.segments) or self.segments[index].start_s > t_s):
            self.segments.insert(index, self.segments[index - 1]._replace(start_s=t_s))
        return index

    def count_slots(self, t_s: float) -> None:
        """Add slot-seconds up to ``t_s``; call before running trajectories or slots change."""
        self.slot_s, self.room_s = self._slot_time(t_s)
        self.slot_at_s = max(t_s, self.slot_at_s)

    def slots_used_frac(self, t_s: float) -> float | None:
        """Mean share of slots in use up to ``t_s``; None without slots."""
        used_s, room_s = self._slot_time(t_s)
        return used_s / room_s if room_s > 0 else None

    def _slot_time(self, t_s: float) -> tuple[float, float]:
        elapsed = 0.0 if self.away or t_s <= self.slot_at_s else t_s - self.slot_at_s
        running, used = self.acting if self.kind == "tools" else self.running, self.num_slots
        used = running if running < used else used
        return self.slot_s + elapsed * used, self.room_s + elapsed * self.num_slots

    def totals(self, since_s: float, until_s: float) -> tuple[Counter[str], Counter[str]]:
        """Seconds and GPU-seconds by state; folded segments count if ``since_s <= 0``."""
        seconds, gpu_s = (self.folded.copy(), self.folded_gpu.copy()) if since_s <= 0 else (Counter(), Counter())
        first = max(0, bisect_left(self.segments, since_s, key=_start_of) - 1)
        for index, segment in enumerate(self.segments[first:], first):
            end_s = self.segments[index + 1].start_s if index + 1 < len(self.segments) else until_s
            elapsed = min(end_s, until_s) - max(segment.start_s, since_s)
            if elapsed > 0 and segment.state != AWAY:
                seconds[segment.state] += elapsed  # type: ignore[assignment]
                gpu_s[segment.state] += elapsed * segment.gpus  # type: ignore[assignment]
        return seconds, gpu_s

    def fold(self, keep: int) -> None:
        """Keep only the newest segments; totals do not change."""
        rest = self.segments[-keep:]
        self.segments = self.segments[: 1 - keep or None]
        seconds, gpu_s = self.totals(1e-300, rest[0].start_s)
        self.folded.update(seconds)
        self.folded_gpu.update(gpu_s)
        self.segments = rest


class Slot(NamedTuple):
    """A trajectory's slot, held since ``since_s``."""

    worker: str
    phase: Phase
    since_s: float


@dataclass(slots=True)
class Trajectory:
    """An open trajectory; ``waits`` is the phase and policy level of the awaited slot."""

    slot: Slot | None = None
    waits: tuple[Phase, int] | None = None
    tokens: int = 0


class Places:
    """Open trajectories by key, with counts of waiting ones (``levels``) and slots (``used``)."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all running and waiting trajectories."""
        self.open: dict[str, Trajectory] = {}
        self.levels: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
        self.used = dict.fromkeys(Phase, 0)

    def waits(self, key: str, where: tuple[Phase, int] | None) -> None:
        """Record that a trajectory awaits a slot at (phase, level), or none."""
        found = self.open.get(key)
        if found is None:
            if where is None:
                return
            found = self.open[key] = Trajectory()
        if found.waits == where:
            return
        if found.waits is not None:
            phase, level = found.waits
            self.levels[phase][level] -= 1
            if not self.levels[phase][level]:
                del self.levels[phase][level]
        found.waits = where
        if where is not None:
            self.levels[where[0]][where[1]] += 1

    def ranked(self, key: str, priority: Sequence[Any]) -> None:
        """Rank a trajectory by (deadline, level, order); the level is 0 if the policy has none."""
        if (found := self.open.get(key)) is not None and found.waits is not None:
            self.waits(key, (found.waits[0], int(priority[1]) if len(priority) > 1 else 0))

    def started(self, key: str, slot: Slot) -> None:
        """Record that a trajectory received a slot and no longer waits."""
        self.waits(key, None)
        if (found := self.open.get(key)) is None:
            found = self.open[key] = Trajectory()
        found.slot = slot
        self.used[slot.phase] += 1

    def stopped(self, key: str) -> Slot | None:
        """Release a trajectory's slot; returns it, or None."""
        found = self.open.get(key)
        if found is None or found.slot is None:
            return None
        slot, found.slot = found.slot, None
        self.used[slot.phase] -= 1
        return slot

    def ended(self, key: str) -> None:
        """Remove an ended trajectory and its slot."""
        self.waits(key, None)
        self.open.pop(key, None)

    def on(self, worker: str) -> list[str]:
        """Keys of trajectories with a slot of this worker."""
        return [key for key, each in self.open.items() if each.slot is not None and each.slot.worker == worker]
