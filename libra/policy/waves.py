"""Which groups of a batch go into which wave of its step, while other groups are generated.

A streamed batch takes the groups of its own iteration, or the first complete groups (`first_come`).
Its gradient is summed over waves: each takes all groups complete when the trainer is free, or only
some if engines turn (`libra.policy.tail`).

Invariants
----------
1. Every group of a batch is in exactly one of its waves.
2. A wave opens only once the wave before has been trained, and keeps its members.
3. ``most`` waves are enough: with w waves left, a wave takes at least a w-th of the groups left.
   Further waves have no members.
4. With `first_come`, groups that a batch leaves behind can meet their deadlines: for each ``i``, at
   most ``(i - j) * B`` plus the places left are due by ``i``. A group that has not begun needs no
   place: it begins with version ``j`` or later, or with ``j - 1`` while ``j`` is being published,
   and then later batches have places. So **lag <= eta** for any order of arrival.
5. Taking only some of the complete groups keeps 4: nearest deadline first, then (iteration, group).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Self

from libra.config.sections import RunSections
from libra.config.streaming import enough_groups, most_waves, wave_groups
from libra.facts import OpenWave
from libra.policy.saved import Saved

GroupId = tuple[int, int]
Members = tuple[GroupId, ...]


class Waves(Saved):
    """The waves of a run's batches, ``most`` per batch (0: steps are not streamed).

    A wave has ``least_groups`` to ``enough_groups`` (0: any number), unless fewer groups are left
    or ``most`` waves would be too few. ``opened`` has the members of each wave, by batch.
    """

    most: int
    least_groups: int
    enough_groups: int
    opened: dict[int, list[Members]]
    _parked: set[GroupId]
    _trained: dict[int, int]  # by batch, waves that were trained

    def __init__(self, most: int = 0, least_groups: int = 1, enough_groups: int = 0) -> None:
        super().__init__()
        self.most, self.least_groups, self.enough_groups = most, least_groups, enough_groups

    @classmethod
    def of(cls, config: RunSections) -> Self:
        return cls(most_waves(config), wave_groups(config), enough_groups(config))

    def parked(self, batch: int, wave: int) -> OpenWave | None:
        waves = self.opened.get(batch, ())
        if wave < len(waves):
            return OpenWave(batch, wave, waves[wave], "opened before; same members")
        self._parked.add((batch, wave))
        return None

    def trained(self, batch: int, wave: int) -> None:
        self._trained[batch] = max(wave + 1, self._trained.get(batch, 0))

    def taken(self, batch: int) -> Members:
        return tuple(group for wave in self.opened.get(batch, ()) for group in wave)

    def take_over(self, opened: Mapping[int, Iterable[Members]]) -> None:
        """Adopt waves of earlier starts, whose gradients are computed again."""
        self.opened = {batch: [tuple(wave) for wave in waves] for batch, waves in opened.items()}

    def next(self, batch: int, groups: int, committed: Iterable[GroupId], *, streams: bool = True) -> OpenWave | None:
        """The next wave that may open now; without ``streams`` it needs all groups left."""
        waves = self.opened.get(batch, [])
        wave, left = len(waves), groups - len(self.taken(batch))
        if (batch, wave) not in self._parked:
            return None
        ready = tuple(sorted(committed))
        if not left:
            return self._open(OpenWave(batch, wave, (), "all groups are in the waves before"))
        wanted = min(left, max(-(-left // (self.most - wave)), self.least_groups)) if streams else left
        if self._trained.get(batch, 0) < wave or len(ready) < wanted:
            return None
        missing, enough = left - len(ready), self.enough_groups
        members = ready[: max(wanted, enough)] if enough else ready
        reason = f"{len(ready)} groups complete and the trainer free, {missing} still to come"
        if others := sum(iteration != batch for iteration, _ in members):
            reason += f"; {others} of {len(members)} are of other iterations"
        return self._open(OpenWave(batch, wave, members, reason))

    def num_trained(self, batch: int) -> int:
        return self._trained.get(batch, 0)

    @property
    def waiting(self) -> list[int]:
        return sorted({batch for batch, _ in self._parked})

    def forget(self, batch: int) -> None:
        self.opened.pop(batch, None)
        self._trained.pop(batch, None)

    def _open(self, command: OpenWave) -> OpenWave:
        self._parked.discard((command.batch, command.wave))
        self.opened.setdefault(command.batch, []).append(command.members)
        return command


def first_come(
    batch: int, places: int, groups_per_batch: int, eta: int, complete: Mapping[GroupId, int], in_flight: Iterable[int]
) -> list[GroupId]:
    """Groups that ``batch`` may take for its ``places``.

    ``complete`` and ``in_flight`` give deadlines of complete groups and of groups in flight.
    """
    due = [0] * eta  # groups left with a deadline of batch + i or before
    for deadline in chain(complete.values(), in_flight):
        for later in range(max(0, deadline - batch), eta):
            due[later] += 1
    found: list[GroupId] = []
    for group, deadline in sorted(complete.items(), key=lambda item: (item[1], item[0])):
        nearer = range(max(0, min(eta, deadline - batch)))
        if not places or any(due[later] > later * groups_per_batch + places - 1 for later in nearer):
            break  # one with a later deadline has these conditions and more
        for later in range(max(0, deadline - batch), eta):
            due[later] -= 1
        places -= 1
        found.append(group)
    return found
