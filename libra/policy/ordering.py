"""The interface of orderings for plugin, simulator and replay, two simple orderings, and a table.

Promises of `Fifo` and `Mlfq`
-----------------------------
1. An earlier iteration always goes before a later iteration.
2. No trajectory starves: in `Fifo` only finitely many are ahead of a trajectory; `Mlfq` has the
   bound of `libra.policy.trajectory_table`.
3. In `Fifo` a trajectory keeps the place of its first parking, so its KV cache is soon reused.
4. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from libra.facts import (
    Fact,
    Prefer,
    Priority,
    QuantumContinued,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
)
from libra.policy.cmlfq import CMLFQ, Objective
from libra.policy.saved import Saved
from libra.policy.trajectory_table import (
    PATIENCE,
    StarvationGuard,
    TrajectoryStats,
    TrajectoryTable,
    length_class,
    overdue_first,
)


@runtime_checkable
class Ordering(Protocol):
    """Decides the order of waiting trajectories, deterministically from the sequence of events.

    ``policy.name`` takes ``package.module:attribute``: a class or function, called with
    ``objective`` and ``patience`` (parkings) if its signature has them. Scheduler, simulator and
    replay each make their own object. After its first error the order is first come, first served.
    `libra.testing.parts.PolicyContract` tests an ordering.
    """

    name: ClassVar[str]
    """Name in event log and page; a user's policy gets ``package.module:attribute``."""

    def handle(self, event: Fact) -> tuple[SetPriority | Prefer, ...]:
        """The commands that answer an event.

        The first answer to a `TrajectoryParked` is a `SetPriority` for its key, whose
        `Priority.deadline` is its iteration. Answers for other keys may follow, also to other
        events; each `Prefer` comes after the `SetPriority` of its key. A `QuantumContinued` may be
        answered with a new rank of its key.
        """

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON-able values."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; KeyError, TypeError or ValueError if it is none."""


LEARNS_EVERY = 32  # ended trajectories between the first calls of ``learn``
LEARNS_RARELY = 256


def learns_after(num_ended: int) -> int:
    """Trajectories that must end before the next ``learn``; ``num_ended`` had ended at the last."""
    return min(LEARNS_RARELY, max(LEARNS_EVERY, num_ended // 32))


@runtime_checkable
class OnlineLearner(Protocol):
    """An ordering that learns off the critical path."""

    def learn(self) -> None:
        """Run the expensive update; deterministic, like `handle`."""

    def forget_live(self) -> None:
        """Forget unfinished trajectories, and keep what finished trajectories taught."""


@runtime_checkable
class Inspectable(Protocol):
    def dashboard_row(self) -> dict[str, Any]:
        """``objective``, ``skill``, ``weights`` by signal, and ``outcomes``; see `CMLFQ`."""


class Fifo(Saved):
    """First come, first served within an iteration; one per run."""

    name: ClassVar[str] = "fifo"
    _arrivals: int
    _order: dict[str, int]

    def handle(self, event: Fact) -> tuple[SetPriority, ...]:
        if type(event) is TrajectoryParked:  # quicker than match, and every event comes here
            order = self._order.get(event.key)
            if order is None:
                order = self._order[event.key] = self._arrivals
                self._arrivals += 1
            return (SetPriority(event.key, Priority(event.iteration, 0, order), "fifo: place of first arrival"),)
        if type(event) is TrajectoryEnded:
            self._order.pop(event.key, None)
        return ()


class Mlfq(Saved):
    """Least attained service first, in half octaves, then by arrival; a baseline."""

    name: ClassVar[str] = "mlfq"
    _trajectories: TrajectoryTable
    _guard: StarvationGuard

    def __init__(self, *, patience: int = PATIENCE) -> None:
        self._trajectories, self._guard = TrajectoryTable(), StarvationGuard(patience)

    def handle(self, event: Fact) -> tuple[SetPriority, ...]:
        stats = self._trajectories.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase):
                assert stats is not None
                overdue = self._guard.parked(key, phase)
                return (self._placed(key, stats), *overdue_first(overdue, self._trajectories))
            case QuantumContinued(key=key):
                if (known := self._trajectories.by_key.get(key)) is not None:
                    before, placed = known.level, self._placed(key, known)
                    return () if known.level == before else (placed,)
            case QuantumStarted(key=key) | TrajectoryEnded(key=key):
                self._guard.left(key)
        return ()

    @staticmethod
    def _placed(key: str, stats: TrajectoryStats) -> SetPriority:
        level = length_class(stats.generated_tokens)
        stats.level = 1 + level
        rank = Priority(stats.iteration, stats.level, stats.arrival)
        return SetPriority(key, rank, f"mlfq: class {level} by tokens generated")


ORDERINGS: dict[str, type[Ordering]] = {kind.name: kind for kind in (Fifo, CMLFQ, Mlfq)}
"""Every ordering by the name that an event log gives it."""


def make_ordering(name: str, *, objective: Objective = "makespan", patience: int = PATIENCE) -> Ordering:
    """The ordering that section ``policy`` names; KeyError for an unknown name."""
    if name == CMLFQ.name:
        return CMLFQ(objective=objective, patience=patience)
    return Mlfq(patience=patience) if name == Mlfq.name else ORDERINGS[name]()
