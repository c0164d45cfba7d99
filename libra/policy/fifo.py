"""First come, first served within an iteration; earlier iterations first.

Promises
--------
1. A trajectory keeps the place it got when it was first parked: one that has started goes before one that has not, so
   its KV cache is used again soon.
2. An earlier iteration always goes before a later one.
3. No trajectory waits for ever: only finitely many trajectories can be ahead of one, those of earlier or equal iterations
   that were parked before it.
4. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

from typing import ClassVar

from libra.facts import Fact, Priority, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.snapshots import Saved


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
