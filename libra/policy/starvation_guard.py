"""The starvation bound: a trajectory passed over too often is served next.

Time is counted in parkings, without a clock: a slot comes free about as often as a trajectory parks. A trajectory that parks
while W others wait in its phase becomes *overdue* after W + ``patience`` further parkings of its phase, and overdue ones go first,
in the order in which they parked. So at most 2 W + ``patience`` dispatches of its iteration and phase pass it over: those that
waited already, and those that parked before it was overdue. (Earlier iterations always go first; there are finitely many. If KV
memory and not slots is short, one that has not begun also waits for some under way to end: `libra.policy.dispatcher`, 3.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from libra.types import Phase

OVERDUE = -1
"""The level of overdue trajectories: before all others of their iteration."""
FEWEST_SORTED = 1_024
"""Parkings that are remembered, of those that left too, before those are dropped."""


class StarvationGuard:
    """Waiting trajectories of every phase, and the parking at which each is overdue."""

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
        if len(due) > FEWEST_SORTED and len(due) > 4 * self._num_waiting[phase]:
            # Those that left keep their place until it is due, which with much patience is hundreds of thousands of parkings later.
            due[:] = [entry for entry in due if self._waiting.get(entry[2]) == (phase, entry[1])]
            heapq.heapify(due)
        return overdue

    def left(self, key: str) -> None:
        """``key`` no longer waits."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._num_waiting[waiting[0]] -= 1

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {
            "parkings": {str(phase): count for phase, count in self._parkings.items()},
            "waiting": {key: [str(phase), number] for key, (phase, number) in sorted(self._waiting.items())},
            "due": {
                str(phase): sorted([at, n, key] for at, n, key in due if self._waiting.get(key) == (phase, n))
                for phase, due in self._due.items()
            },
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        self._parkings = {phase: int(snapshot["parkings"][str(phase)]) for phase in Phase}
        self._waiting = {str(key): (Phase(phase), int(n)) for key, (phase, n) in snapshot["waiting"].items()}
        self._num_waiting = {phase: sum(at is phase for at, _ in self._waiting.values()) for phase in Phase}
        self._due = {
            phase: [(int(at), int(n), str(key)) for at, n, key in snapshot["due"][str(phase)]] for phase in Phase
        }
