"""The trajectory table of an ordering: arrival, generated tokens and tool calls of each trajectory."""

from __future__ import annotations

from math import log2
from sys import intern

import msgspec

from libra.facts import Fact, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.snapshots import Saved
from libra.types import Phase

NUM_CLASSES = 40
"""Length classes are half octaves: class c holds 2 ** (c / 2) - 1 tokens and more; the last one has everything longer."""


def length_class(tokens: float) -> int:
    """The class of a number of tokens, 0 for none."""
    return min(NUM_CLASSES - 1, int(2.0 * log2(1.0 + tokens)))


class TrajectoryStats(msgspec.Struct, array_like=True, gc=False):
    """One trajectory between its first parking and its end.

    Attributes
    ----------
    arrival : int
        Number of trajectories parked for the first time before it.
    generated_tokens, calls : int
        Tokens sampled; tool calls that returned.
    remaining_tokens : float
        Its last forecast; for orderings that have one.
    counted : bool
        Whether it is among its group's members; for orderings that count them.
    level, total_class : int
        Its last level, and the class of its forecast total length; -1: none.
    told_class, begins_tp : int
        Length class that the dispatcher has, -1: none; planned degree that it has, 0: none.
    context_tokens : int
        Context that another engine would have to compute to continue it, as far as it is known.
    """

    arrival: int
    iteration: int
    group: str
    phase: Phase
    generated_tokens: int = 0
    calls: int = 0
    remaining_tokens: float = 0.0
    counted: bool = False
    level: int = -1
    total_class: int = -1
    told_class: int = -1
    begins_tp: int = 0
    context_tokens: int = 0


class TrajectoryTable(Saved):
    """Trajectories that have not ended, by key."""

    SAVED = {"_arrivals": int, "by_key": dict[str, TrajectoryStats]}

    def __init__(self) -> None:
        self.by_key: dict[str, TrajectoryStats] = {}
        self._arrivals = 0

    def handle(self, event: Fact) -> TrajectoryStats | None:
        """Update from one event; returns its trajectory, also when it ends. None: unknown, or not about a trajectory."""
        # Type comparisons instead of match, here and in other handlers of every event: they take a third of the time.
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
            stats = self.by_key.get(event.key)
            if stats is not None:
                stats.generated_tokens += event.tokens
                stats.context_tokens += event.tokens + event.payload_tokens
                stats.calls += bool(event.tool)
            return stats
        if type(event) is TrajectoryEnded:
            return self.by_key.pop(event.key, None)
        return None
