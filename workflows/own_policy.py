"""A scheduling policy of your own: ``python workflows/own_policy.py``. It can be simulated and replayed, for it is pure."""

from __future__ import annotations

import sys

import libra
from libra.config import typed_settings
from libra.facts import Priority, SetPriority, TrajectoryEnded, TrajectoryParked


class FewestTurnsFirst:
    """Trajectories with the fewest finished quanta first; among equals the first to arrive."""

    name = "fewest_turns"

    def __init__(self):
        self.arrivals = {}

    def handle(self, event):
        if isinstance(event, TrajectoryParked):
            order = self.arrivals.setdefault(event.key, len(self.arrivals))
            place = Priority(event.iteration, event.quanta, order)
            return (SetPriority(event.key, place, f"{event.quanta} quanta are done"),)
        if isinstance(event, TrajectoryEnded):
            self.arrivals.pop(event.key, None)
        return ()

    def snapshot(self):
        return {"arrivals": dict(self.arrivals)}

    def restore(self, snapshot):
        self.arrivals = dict(snapshot["arrivals"])


if __name__ == "__main__":
    settings = {"run__iterations": 5, "trainer__lr": 5e-4} | typed_settings(sys.argv[1:])
    print(libra.train(policy__name=FewestTurnsFirst, **settings))
