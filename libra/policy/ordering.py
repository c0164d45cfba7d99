"""What the plugin, the simulator and a replay expect of an object that orders trajectories, and which ones there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from libra.policy.attained_service import PATIENCE, CompletedCalls, Mlfq
from libra.policy.cmlfq import CMLFQ, Objective, Oracle, Predictor
from libra.policy.fifo import Fifo
from libra.policy.messages import Event, Prefer, SetPriority
from libra.policy.paper_rule import PaperRule


class Ordering(Protocol):
    """Decides who goes first; deterministic in the sequence of events.

    A `TrajectoryParked` is answered with a `SetPriority` for its key first; answers for other keys may follow, also to other
    events; each `Prefer` comes after the `SetPriority` of its key. ``restore(snapshot())`` changes no later answer, and a
    snapshot survives JSON.
    """

    name: ClassVar[str]

    def handle(self, event: Event) -> tuple[SetPriority | Prefer, ...]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, snapshot: Mapping[str, Any]) -> None: ...


LEARNS_EVERY = 32
"""Trajectories that end between the first calls of an ordering's ``learn``; later there are more, see `learns_after`."""
LEARNS_SELDOM = 256
"""At most so many."""


def learns_after(num_ended: int) -> int:
    """How many more are to end before the next ``learn``, where so many had ended at the last one.

    Another thirty-second of what is known changes little, and solving anew takes as long whether there is more or not.
    """
    return min(LEARNS_SELDOM, max(LEARNS_EVERY, num_ended // 32))


@runtime_checkable
class OnlineLearner(Protocol):
    """An ordering that learns off the critical path."""

    def learn(self) -> None:
        """Do the dear part of learning from what has finished since the last time; deterministic, like `handle`."""

    def forget_live(self) -> None:
        """Forget who lives, and keep what was learned from those that ended."""


@runtime_checkable
class Inspectable(Protocol):
    """An ordering that has something to show to people beside its order."""

    def shown(self) -> dict[str, Any]:
        """As values that JSON can hold: ``objective``, ``skill``, ``weights`` by signal, ``outcomes``; see `CMLFQ.shown`."""


ORDERINGS: dict[str, type[Ordering]] = {
    kind.name: kind for kind in (Fifo, CMLFQ, PaperRule, Mlfq, CompletedCalls, Predictor, Oracle)
}
"""Every ordering by the name that an event log gives it; without arguments each has its defaults, until it is restored."""


def make_ordering(name: str, *, objective: Objective = "makespan", patience: int = PATIENCE) -> Ordering:
    """The ordering that ``policy`` of a configuration asks for; KeyError for a name that is none."""
    if name in (Fifo.name, PaperRule.name):
        return ORDERINGS[name]()
    if name == CMLFQ.name:
        return CMLFQ(objective=objective, patience=patience)
    return ORDERINGS[name](patience=patience)  # type: ignore[call-arg]
