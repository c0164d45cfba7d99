"""The agenda of a simulation: what happens at which virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Agenda:
    """Future events by their time, and the virtual time."""

    now_s: float = 0.0
    entries: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    added: int = 0

    def at(self, at_s: float, happens: Callable[..., None], *what: object) -> None:
        """Call ``happens`` at a time; in order of insertion if times are equal."""
        self.added += 1
        heapq.heappush(self.entries, (at_s, self.added, happens, what))

    def advance(self) -> int:
        """Call everything of the next instant; returns how many."""
        entries, called = self.entries, 0
        now_s = self.now_s = entries[0][0]
        while entries and entries[0][0] == now_s:
            _, _, happens, what = heapq.heappop(entries)
            happens(*what)
            called += 1
        return called
