"""Least attained service first: an ordering without forecasts.

Promises
--------
1. An earlier iteration always goes before a later one.
2. No trajectory is passed over for ever: `libra.policy.starvation_guard` bounds it.
3. ``restore(snapshot())`` changes no later command.
"""

from __future__ import annotations

from typing import ClassVar

from libra.facts import Fact, Priority, QuantumContinued, QuantumStarted, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.snapshots import Saved
from libra.policy.starvation_guard import OVERDUE, StarvationGuard
from libra.policy.trajectory_table import TrajectoryStats, TrajectoryTable, length_class

PATIENCE = 200_000
"""Default of ``patience``, in parkings: five thousand trajectories of forty turns, more than one iteration as a rule. (At 20,000,
those of a large iteration that had not begun were overdue after minutes, and the order was that of arrival.)"""


class Mlfq(Saved):
    """Least attained service first, in classes of half octaves, then by arrival.

    The classic multi-level feedback queue, without forecasts; a baseline.
    """

    name: ClassVar[str] = "mlfq"
    SAVED = {"_trajectories": TrajectoryTable, "_guard": StarvationGuard}

    def __init__(self, *, patience: int = PATIENCE) -> None:
        self._trajectories = TrajectoryTable()
        self._guard = StarvationGuard(patience)

    def handle(self, event: Fact) -> tuple[SetPriority, ...]:
        """Answer one event; deterministic in the sequence of events."""
        stats = self._trajectories.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase):
                assert stats is not None
                overdue = self._guard.parked(key, phase)
                stats.level, reason = self._level(stats)
                own = SetPriority(key, Priority(stats.iteration, stats.level, stats.arrival), reason)
                return (own, *overdue_first(overdue, self._trajectories))
            case QuantumContinued(key=key):
                return self._continued(key)
            case QuantumStarted(key=key) | TrajectoryEnded(key=key):
                self._guard.left(key)
        return ()

    def _continued(self, key: str) -> tuple[SetPriority, ...]:
        """The new rank of a trajectory that keeps its slot."""
        if (stats := self._trajectories.by_key.get(key)) is None:
            return ()
        before, (stats.level, reason) = stats.level, self._level(stats)
        rank = Priority(stats.iteration, stats.level, stats.arrival)
        return () if stats.level == before else (SetPriority(key, rank, reason),)

    def _level(self, stats: TrajectoryStats) -> tuple[int, str]:
        level = length_class(stats.generated_tokens)
        return 1 + level, f"mlfq: class {level} by tokens generated"


def overdue_first(overdue: list[tuple[str, int]], trajectories: TrajectoryTable) -> tuple[SetPriority, ...]:
    """Level -1 for overdue trajectories, in the order in which they parked."""
    return tuple(
        SetPriority(
            key, Priority(trajectories.by_key[key].iteration, OVERDUE, number), "overdue: passed over for too long"
        )
        for key, number in overdue
    )
