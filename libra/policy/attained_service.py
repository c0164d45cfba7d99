"""Orderings that look only at what a trajectory has had so far: least attained service, and most completed tool calls.

Promises
--------
1. An earlier iteration always goes before a later one.
2. Nobody is passed over for ever; the bound is `libra.policy.starvation_guard`'s.
3. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from libra.policy.messages import Event, Priority, QuantumStarted, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.starvation_guard import OVERDUE, StarvationGuard
from libra.policy.trajectory_table import TrajectoryStats, TrajectoryTable, length_class

PATIENCE = 200_000
"""Default of ``patience``, in parkings: five thousand trajectories of forty turns, more than one iteration as a rule. (At 20,000,
those of a large iteration that had not begun were overdue after minutes, and the order was that of arrival.)"""


class Mlfq:
    """Least attained service: who has generated least goes first, in classes of half octaves, then by arrival.

    The multi-level feedback queue of old, which knows nothing of what is left; a baseline.
    """

    name: ClassVar[str] = "mlfq"

    def __init__(self, *, patience: int = PATIENCE) -> None:
        self._lives = TrajectoryTable()
        self._patience = StarvationGuard(patience)

    def handle(self, event: Event) -> tuple[SetPriority, ...]:
        """Answer one event; deterministic in the sequence of events."""
        life = self._lives.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase):
                assert life is not None
                overdue = self._patience.parked(key, phase)
                level, reason = self._level(life)
                own = SetPriority(key, Priority(life.iteration, level, life.arrival), reason)
                return (own, *overdue_first(overdue, self._lives))
            case QuantumStarted(key=key) | TrajectoryEnded(key=key):
                self._patience.left(key)
        return ()

    def _level(self, life: TrajectoryStats) -> tuple[int, str]:
        level = length_class(life.generated_tokens)
        return 1 + level, f"mlfq: class {level} by tokens generated"

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold; see `restore`."""
        return {
            "lives": self._lives.snapshot(),
            "patience": self._patience.patience,
            "waiting": self._patience.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else; KeyError, TypeError or ValueError where it is no snapshot."""
        self._lives.restore(snapshot["lives"])
        self._patience = StarvationGuard(int(snapshot["patience"]))
        self._patience.restore(snapshot["waiting"])


class CompletedCalls(Mlfq):
    """Whoever has completed most tool calls goes first, then by arrival (DynaRL, OSDI '26, as its README describes it)."""

    name: ClassVar[str] = "completed_calls"

    def _level(self, life: TrajectoryStats) -> tuple[int, str]:
        return 1 + max(0, MOST_CALLS - life.calls), f"completed_calls: {life.calls} tool calls came back"


MOST_CALLS = 10_000
"""Calls beyond these make no difference to `CompletedCalls`."""


def overdue_first(overdue: list[tuple[str, int]], lives: TrajectoryTable) -> tuple[SetPriority, ...]:
    """Level -1 for those who have waited for too long, in the order in which they parked."""
    return tuple(
        SetPriority(key, Priority(lives.by_key[key].iteration, OVERDUE, number), "overdue: passed over for too long")
        for key, number in overdue
    )
