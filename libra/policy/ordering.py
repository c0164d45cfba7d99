"""What the plugin, the simulator and a replay expect of an object that orders trajectories, and which ones there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from libra.policy.attained import CompletedCalls, Mlfq
from libra.policy.cmlfq import CMLFQ, Oracle, Predictor
from libra.policy.fifo import Fifo
from libra.policy.messages import Event, Prefer, SetPriority
from libra.policy.paper import PaperRule


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


ORDERINGS: dict[str, type[Ordering]] = {
    kind.name: kind for kind in (Fifo, CMLFQ, PaperRule, Mlfq, CompletedCalls, Predictor, Oracle)
}
"""Every ordering by the name that an event log gives it; without arguments each has its defaults, until it is restored."""
