"""The interface of orderings for plugin, simulator and replay, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from libra.facts import Fact, Prefer, SetPriority
from libra.policy.attained_service import PATIENCE, Mlfq
from libra.policy.cmlfq import CMLFQ, Objective
from libra.policy.fifo import Fifo


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
