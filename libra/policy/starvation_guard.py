"""The starvation bound: a trajectory passed over too often is served next.

Time is counted in parkings, without a clock: a slot comes free about as often as a trajectory parks. A trajectory that parks
while W others wait in its phase becomes *overdue* after W + ``patience`` further parkings of its phase, and overdue ones go first,
in the order in which they parked. So at most 2 W + ``patience`` dispatches of its iteration and phase pass it over: those that
waited already, and those that parked before it was overdue. (Earlier iterations always go first; there are finitely many. If KV
memory and not slots is short, one that has not begun also waits for some under way to end: `libra.policy.dispatcher`, 3.)
"""

from __future__ import annotations

import heapq

from libra.policy.snapshots import Saved
from libra.types import Phase

OVERDUE = -1
"""The level of overdue trajectories: before all others of their iteration."""
FEWEST_SORTED = 1_024
"""Parkings that are remembered, of those that left too, before those are dropped."""


class StarvationGuard(Saved):
    """Waiting trajectories of every phase, and the parking at which each is overdue."""

    SAVED = {
        "patience": int,
        "_parkings": dict[Phase, int],
        "_waiting": dict[str, tuple[Phase, int]],
        "_num_waiting": dict[Phase, int],
        "_due": dict[Phase, list[tuple[int, int, str]]],
    }

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._parkings = dict.fromkeys(Phase, 0)
        self._waiting: dict[str, tuple[Phase, int]] = {}  # and the number of its parking
        self._num_waiting = dict.fromkeys(Phase, 0)
        self._due: dict[Phase, list[tuple[int, int, str]]] = {
            phase: [] for phase in Phase
        }  # heaps of (due, parking, key)

    def parked(self, key: str, phase: Phase) -> list[tuple[str, int]]:
        """``key`` waits from now on; returns the trajectories that this parking makes overdue, each once, with the number
        of its parking."""
        self.left(key)
        due = self._due[phase]
        now = self._parkings[phase] = self._parkings[phase] + 1
        overdue = []
        while due and due[0][0] <= now:
            _, number, waiting = heapq.heappop(due)
            if self._waiting.get(waiting) == (phase, number):
                overdue.append((waiting, number))
        heapq.heappush(due, (now + self.patience + self._num_waiting[phase], now, key))
        self._waiting[key] = (phase, now)
        self._num_waiting[phase] += 1
        if len(due) > FEWEST_SORTED and len(due) > 2 * self._num_waiting[phase]:
            # Those that left keep their place until it is due, which with much patience is hundreds of thousands of parkings later.
            due[:] = [entry for entry in due if self._waiting.get(entry[2]) == (phase, entry[1])]
            heapq.heapify(due)
        return overdue

    def left(self, key: str) -> None:
        """``key`` no longer waits."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._num_waiting[waiting[0]] -= 1
