"""State that orderings share: the table of trajectories, and the starvation bound.

Time is counted in parkings, without a clock: slots come free about as often as trajectories park. A
trajectory that parks while W others wait in its phase becomes *overdue* after W + ``patience``
further parkings of the phase. Overdue trajectories go first, in the order they parked. So at most 2
W + ``patience`` dispatches of its iteration and phase pass a trajectory over. Earlier iterations
always go first.
"""

from __future__ import annotations

import heapq
from math import log2
from sys import intern

import msgspec

from libra.facts import Fact, Priority, QuantumFinished, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.saved import Saved
from libra.types import Phase

NUM_CLASSES = 40  # length classes are half octaves: class c holds 2 ** (c / 2) - 1 tokens and more


def length_class(tokens: float) -> int:
    return min(NUM_CLASSES - 1, int(2.0 * log2(1.0 + tokens)))


class TrajectoryStats(msgspec.Struct, array_like=True, gc=False):
    arrival: int  # number of trajectories that parked before it
    iteration: int
    group: str
    phase: Phase
    generated_tokens: int = 0  # sampled
    calls: int = 0  # tool calls that returned
    remaining_tokens: float = 0.0  # its last forecast
    counted: bool = False  # among its group's members
    level: int = -1  # its last one
    total_class: int = -1  # of its forecast total; -1: none
    told_class: int = -1  # class that the dispatcher has; -1: none
    begins_tp: int = 0  # planned degree that the dispatcher has; 0: none
    context_tokens: int = 0  # that another engine would have to compute


class TrajectoryTable(Saved):
    _arrivals: int
    by_key: dict[str, TrajectoryStats]

    def handle(self, event: Fact) -> TrajectoryStats | None:
        """Update from one event; returns its trajectory if known, also when the trajectory ends."""
        # Type comparisons take a third of match's time, here and in other handlers of every event.
        if type(event) is TrajectoryParked:
            stats = self.by_key.get(event.key)
            if stats is None:
                stats = TrajectoryStats(self._arrivals, event.iteration, intern(event.group), event.phase)
                self.by_key[event.key] = stats
                self._arrivals += 1
            stats.iteration, stats.phase = event.iteration, event.phase
            if event.context_tokens:
                stats.context_tokens = event.context_tokens
            return stats
        if type(event) is QuantumFinished:
            if (stats := self.by_key.get(event.key)) is not None:
                stats.generated_tokens += event.tokens
                stats.context_tokens += event.tokens + event.payload_tokens
                stats.calls += bool(event.tool)
            return stats
        return self.by_key.pop(event.key, None) if type(event) is TrajectoryEnded else None


OVERDUE = -1  # the level of overdue trajectories: before all others of their iteration
FEWEST_SORTED = 1_024  # entries of the heap, stale ones too, up to which it is not rebuilt


class StarvationGuard(Saved):
    """Waiting trajectories of every phase, and the parking at which each becomes overdue."""

    patience: int
    _parkings: dict[Phase, int]
    _waiting: dict[str, tuple[Phase, int]]  # and the number of its parking
    _num_waiting: dict[Phase, int]
    _due: dict[Phase, list[tuple[int, int, str]]]  # heaps of (due, parking, key)

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.patience = patience
        self._parkings, self._num_waiting = dict.fromkeys(Phase, 0), dict.fromkeys(Phase, 0)
        self._due = {phase: [] for phase in Phase}

    def parked(self, key: str, phase: Phase) -> list[tuple[str, int]]:
        """``key`` waits; returns newly overdue trajectories, each with its parking number."""
        self.left(key)
        due = self._due[phase]
        now = self._parkings[phase] = self._parkings[phase] + 1
        overdue = []
        while due and due[0][0] <= now:
            _, number, waiting = heapq.heappop(due)
            if self._waiting.get(waiting) == (phase, number):
                overdue.append((waiting, number))
        heapq.heappush(due, (now + self.patience + self._num_waiting[phase], now, key))
        self._waiting[key] = (phase, now)
        self._num_waiting[phase] += 1
        if len(due) > FEWEST_SORTED and len(due) > 2 * self._num_waiting[phase]:
            # Those that left keep their place until it is due, which may be very long.
            due[:] = [entry for entry in due if self._waiting.get(entry[2]) == (phase, entry[1])]
            heapq.heapify(due)
        return overdue

    def left(self, key: str) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._num_waiting[waiting[0]] -= 1


PATIENCE = 200_000  # five thousand trajectories of forty turns: more than most iterations


def overdue_first(overdue: list[tuple[str, int]], trajectories: TrajectoryTable) -> tuple[SetPriority, ...]:
    places = ((key, Priority(trajectories.by_key[key].iteration, OVERDUE, number)) for key, number in overdue)
    return tuple(SetPriority(key, place, "overdue: passed over for too long") for key, place in places)
