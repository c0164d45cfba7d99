"""The bound on waiting: who has been passed over for long enough goes first.

Promise
-------
Nobody keeps a clock, so time is counted in parkings: a slot comes free about as often as somebody parks. A trajectory that parks
while W others wait in its phase becomes *overdue* after W + ``patience`` further parkings of its phase, and overdue ones go
first, in the order in which they parked. So at most 2 W + ``patience`` dispatches of its iteration and phase pass it over: those
that waited already, and those that parked before it was overdue. (Earlier iterations always go first; there are finitely
many. Where it is KV memory and not slots that is short, one that has not begun also waits for some of those under way to end:
`libra.policy.dispatcher`, 3.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from libra.types import Phase

OVERDUE = -1
"""The level of those that have waited for too long: before everybody else of their iteration."""


class StarvationGuard:
    """Waiting trajectories of every phase, and when each is overdue."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._parkings = dict.fromkeys(Phase, 0)
        self._waiting: dict[str, tuple[Phase, int]] = {}  # and the number of its parking
        self._num_waiting = dict.fromkeys(Phase, 0)
        self._due: dict[Phase, list[tuple[int, int, str]]] = {
            phase: [] for phase in Phase
        }  # heaps of (due, parking, key)

    def parked(self, key: str, phase: Phase) -> list[tuple[str, int]]:
        """``key`` waits from now on; answers who has become overdue by that, each once, with the number of its parking."""
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
        return overdue

    def left(self, key: str) -> None:
        """``key`` does not wait any more."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._num_waiting[waiting[0]] -= 1

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {
            "parkings": {str(phase): count for phase, count in self._parkings.items()},
            "waiting": {key: [str(phase), number] for key, (phase, number) in sorted(self._waiting.items())},
            "due": {
                str(phase): sorted([at, n, key] for at, n, key in due if self._waiting.get(key) == (phase, n))
                for phase, due in self._due.items()
            },
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._parkings = {phase: int(snapshot["parkings"][str(phase)]) for phase in Phase}
        self._waiting = {str(key): (Phase(phase), int(n)) for key, (phase, n) in snapshot["waiting"].items()}
        self._num_waiting = {phase: sum(at is phase for at, _ in self._waiting.values()) for phase in Phase}
        self._due = {
            phase: [(int(at), int(n), str(key)) for at, n, key in snapshot["due"][str(phase)]] for phase in Phase
        }
