"""The interface of orderings for plugin, simulator and replay, and the table of them.

First come, first served within an iteration; earlier iterations first.

Promises
--------
1. A trajectory keeps the place it got when it was first parked: one that has started goes before one that has not, so
   its KV cache is used again soon.
2. An earlier iteration always goes before a later one.
3. No trajectory waits for ever: only finitely many trajectories can be ahead of one, those of earlier or equal iterations
   that were parked before it.
4. ``restore(snapshot())`` changes no later answer.


Least attained service first: an ordering without forecasts.

Promises
--------
1. An earlier iteration always goes before a later one.
2. No trajectory is passed over for ever: `libra.policy.trajectory_table` bounds it.
3. ``restore(snapshot())`` changes no later command.

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
    """Decides the order of waiting trajectories; deterministic in the sequence of events, without clock, files or randomness.

    ``policy.name`` takes ``package.module:attribute`` of one's own: a class, or a function that makes an object, called without
    arguments, or with those of ``objective`` and ``patience`` (parkings) that it takes by name. Scheduler, simulator and replay
    each make an object of their own. If it raises, the order is first come, first served from then on.
    `libra.testing.parts.PolicyContract` tests one.
    """

    name: ClassVar[str]
    """Name in event log and page; of a policy of one's own it becomes ``package.module:attribute``."""

    def handle(self, event: Fact) -> tuple[SetPriority | Prefer, ...]:
        """The commands that answer an event.

        A `TrajectoryParked` is answered with a `SetPriority` for its key first, with `Priority.deadline` its iteration; answers
        for other keys may follow, also to other events; each `Prefer` comes after the `SetPriority` of its key. A
        `QuantumContinued` may be answered with a new rank of its key, which keeps its slot as long as nothing better waits.
        """

    def snapshot(self) -> dict[str, Any]:
        """Its whole state as JSON-able values: ``restore(snapshot())`` changes no later answer."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``, options included; KeyError, TypeError or ValueError if it is not a snapshot."""


LEARNS_EVERY = 32
"""Finished trajectories between the first calls of an ordering's ``learn``; later more, see `learns_after`."""
LEARNS_RARELY = 256
"""Upper bound of that number."""


def learns_after(num_ended: int) -> int:
    """Number of trajectories that must end before the next ``learn``, given how many had ended at the last one.

    A thirty-second more data changes little, and the time to solve does not depend on the amount of data.
    """
    return min(LEARNS_RARELY, max(LEARNS_EVERY, num_ended // 32))


@runtime_checkable
class OnlineLearner(Protocol):
    """An ordering that learns off the critical path."""

    def learn(self) -> None:
        """Run the expensive update on trajectories that ended since the last call; deterministic, like `handle`."""

    def forget_live(self) -> None:
        """Drop running trajectories, and keep what was learned from finished ones."""


@runtime_checkable
class Inspectable(Protocol):
    """An ordering with figures for the dashboard."""

    def dashboard_row(self) -> dict[str, Any]:
        """The figures as JSON-able values: ``objective``, ``skill``, ``weights`` by signal, ``outcomes``; see `CMLFQ`."""


class Fifo(Saved):
    """The order of arrival as a policy object; one per run."""

    SAVED = {"_arrivals": int, "_order": dict[str, int]}

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        self._order: dict[str, int] = {}
        self._arrivals = 0

    def handle(self, event: Fact) -> tuple[SetPriority, ...]:
        """Answer one event; deterministic in the sequence of events."""
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


ORDERINGS: dict[str, type[Ordering]] = {kind.name: kind for kind in (Fifo, CMLFQ, Mlfq)}
"""Every ordering by the name that an event log gives it; without arguments each is built with defaults, until it is
restored."""


def blank_ordering(name: str) -> Ordering:
    """An ordering that ships, to be restored; KeyError for an unknown name."""
    return ORDERINGS[name]()


def make_ordering(name: str, *, objective: Objective = "makespan", patience: int = PATIENCE) -> Ordering:
    """The ordering that section ``policy`` of a configuration names; KeyError for an unknown name."""
    if name == CMLFQ.name:
        return CMLFQ(objective=objective, patience=patience)
    return Mlfq(patience=patience) if name == Mlfq.name else ORDERINGS[name]()
