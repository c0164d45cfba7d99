"""Parked trajectories in the order of ``ts.priority``, one queue for each phase.

Invariants
----------
1. ``pop`` gives the key with the smallest (priority, arrival) of those pushed and not yet popped or dropped.
2. A key is in a queue at most once: pushing it again replaces its place, so a demotion is never lost to a stale entry.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from libra.policy import Priority


class ParkedQueue:
    """A priority queue whose entries can be re-ordered; O(log n) each."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, int, str]] = []
        self._live: dict[str, tuple[Priority, int]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def push(self, key: str, priority: Priority) -> None:
        """Add ``key``, or move it to its new place."""
        self._pushes += 1
        self._live[key] = (priority, self._pushes)
        heapq.heappush(self._heap, (priority, self._pushes, key))

    def drop(self, key: str) -> None:
        """Forget ``key`` if it is there."""
        self._live.pop(key, None)

    def pop(self, fits: Callable[[str], bool] | None = None) -> str | None:
        """The first key in order (of those that fit, where given), removed; None where there is none. Others keep their place."""
        passed: list[tuple[Priority, int, str]] = []
        found = None
        while self._heap and found is None:
            priority, serial, key = heapq.heappop(self._heap)
            if self._live.get(key) != (priority, serial):
                continue
            if fits is None or fits(key):
                del self._live[key]
                found = key
            else:
                passed.append((priority, serial, key))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def levels(self, run_of: dict[str, str], run: str) -> dict[int, int]:
        """How many keys of ``run`` wait at each level."""
        return dict(Counter(p.level for key, (p, _) in self._live.items() if run_of.get(key) == run))
