"""Which worker has room for how many quanta of each phase.

Invariant: a worker never holds more quanta of a phase than it declares slots for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from libra.types import Phase


class Slots:
    """Quanta given to workers and not yet back, by (phase, address)."""

    def __init__(self) -> None:
        self._taken: dict[tuple[Phase, str], set[str]] = {}

    def take(self, phase: Phase, address: str, key: str) -> None:
        """``key`` runs a quantum there now."""
        self._taken.setdefault((phase, address), set()).add(key)

    def give_back(self, phase: Phase, address: str, key: str) -> None:
        """``key`` is no longer there."""
        taken = self._taken.get((phase, address))
        if taken is not None:
            taken.discard(key)
            if not taken:
                del self._taken[phase, address]

    def lose(self, address: str) -> None:
        """The worker is gone, and all that ran there."""
        for phase in Phase:
            self._taken.pop((phase, address), None)

    def used(self, phase: Phase) -> int:
        """Quanta of this phase running anywhere."""
        return sum(len(keys) for (kind, _), keys in self._taken.items() if kind is phase)

    def free(self, phase: Phase, supply: Mapping[str, int]) -> dict[str, int]:
        """Free slots by address, only where there are any."""
        free = {address: count - len(self._taken.get((phase, address), ())) for address, count in supply.items()}
        return {address: count for address, count in free.items() if count > 0}


def choose(free: Mapping[str, int], home: str | None, barred: Collection[str] = ()) -> str:
    """The worker that holds the trajectory's KV cache where it has room, else the one with most room; never one of ``barred``."""
    if home is not None and home in free and home not in barred:
        return home
    return max((a for a in free if a not in barred), key=lambda address: (free[address], address))
