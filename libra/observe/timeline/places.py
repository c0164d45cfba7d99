"""Where each open trajectory of a run is: in a slot of a worker, or waiting for one, and since when.

Invariant: a trajectory has at most one slot and waits for at most one; counts by phase and level agree with the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from libra.types import Phase


class Slot(NamedTuple):
    """A slot that a trajectory has since ``since_s``."""

    worker: str
    phase: Phase
    since_s: float


@dataclass(slots=True)
class Trajectory:
    """An open trajectory; ``waits``: phase and policy level of the slot that it waits for."""

    slot: Slot | None = None
    waits: tuple[Phase, int] | None = None
    tokens: int = 0


class Places:
    """Open trajectories by key.

    Attributes
    ----------
    levels : dict of Phase to Counter
        Waiting trajectories by phase and level; levels without one are left out.
    used : dict of Phase to int
        Slots in use.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing runs or waits."""
        self.open: dict[str, Trajectory] = {}
        self.levels: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
        self.used = dict.fromkeys(Phase, 0)

    def of(self, key: str) -> Trajectory:
        """The record of a trajectory, which is open from now on."""
        found = self.open.get(key)
        if found is None:
            found = self.open[key] = Trajectory()
        return found

    def waits(self, key: str, where: tuple[Phase, int] | None) -> None:
        """The trajectory waits for a slot of a phase, at a level; None: it does not wait."""
        found = self.open.get(key) if where is None else self.of(key)
        if found is None or found.waits == where:
            return
        if found.waits is not None:
            phase, level = found.waits
            self.levels[phase][level] -= 1
            if not self.levels[phase][level]:
                del self.levels[phase][level]
        found.waits = where
        if where is not None:
            self.levels[where[0]][where[1]] += 1

    def ranked(self, key: str, priority: Sequence[Any]) -> None:
        """The policy ranks a trajectory (deadline, level, order); a policy without levels has level 0."""
        if (found := self.open.get(key)) is not None and found.waits is not None:
            self.waits(key, (found.waits[0], int(priority[1]) if len(priority) > 1 else 0))

    def started(self, key: str, slot: Slot) -> None:
        """The trajectory has a slot, and waits no longer."""
        self.waits(key, None)
        self.of(key).slot = slot
        self.used[slot.phase] += 1

    def stopped(self, key: str) -> Slot | None:
        """The slot that the trajectory leaves; None: it had none."""
        found = self.open.get(key)
        if found is None or found.slot is None:
            return None
        slot, found.slot = found.slot, None
        self.used[slot.phase] -= 1
        return slot

    def ended(self, key: str) -> None:
        """The trajectory has ended, and has no slot any more."""
        self.waits(key, None)
        self.open.pop(key, None)

    def on(self, worker: str) -> list[str]:
        """Keys of the trajectories that have a slot of this worker."""
        return [key for key, each in self.open.items() if each.slot is not None and each.slot.worker == worker]
