"""Which groups of a batch go into which wave of its step, while other groups are still being generated; a pure object.

A batch of a streamed run is the groups of its own iteration, or those that are complete first (`libra.policy.first_come`). Its
gradient is added up in waves, one after the other: a wave takes all groups that are complete when the trainer is free, or where
engines turn (`libra.policy.tail`) only some, so that one that comes to train need not wait long for the next wave.

Invariants
----------
1. Every group of a batch is in exactly one of its waves, in the order of their numbers within it.
2. A wave opens only once the wave before it was trained, and keeps its members from then on, whoever asks again.
3. ``most`` waves are enough: with w waves left a wave takes at least a w-th of the groups left, so the last one can take the rest.
   Waves that are left over have no members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from libra.facts import OpenWave
from libra.policy.snapshots import Saved

GroupId = tuple[int, int]
Members = tuple[GroupId, ...]


class Waves(Saved):
    """The waves of a run's batches.

    Parameters
    ----------
    most : int
        Waves of a batch; 0: steps are not streamed.
    least_groups : int
        Groups of a wave at least, unless fewer are left.
    enough_groups : int
        Groups of a wave at most, unless ``most`` waves of so many are too few; 0: any number.

    Attributes
    ----------
    opened : dict of int to list of tuples of (iteration, group)
        Members of each wave that was opened, by batch, of the newest batches.
    """

    SAVED = {
        "most": int,
        "least_groups": int,
        "enough_groups": int,
        "opened": dict[int, list[Members]],
        "_parked": set[GroupId],
        "_trained": dict[int, int],
    }

    def __init__(self, most: int = 0, least_groups: int = 1, enough_groups: int = 0) -> None:
        self.most, self.least_groups, self.enough_groups = most, least_groups, enough_groups
        self.opened: dict[int, list[Members]] = {}
        self._parked: set[tuple[int, int]] = set()
        self._trained: dict[int, int] = {}  # by batch, waves that were trained

    def parked(self, batch: int, wave: int) -> OpenWave | None:
        """A wave requests its groups; the answer if it was opened before."""
        waves = self.opened.get(batch, ())
        if wave < len(waves):
            return OpenWave(batch, wave, waves[wave], "opened before; same members")
        self._parked.add((batch, wave))
        return None

    def trained(self, batch: int, wave: int) -> None:
        """The gradient of a wave was added."""
        self._trained[batch] = max(wave + 1, self._trained.get(batch, 0))

    def taken(self, batch: int) -> Members:
        """The groups of a batch that waves have, in their order."""
        return tuple(group for wave in self.opened.get(batch, ()) for group in wave)

    def take_over(self, opened: Mapping[int, Iterable[Members]]) -> None:
        """Take over waves that earlier starts of the run committed, whose gradients are computed again."""
        self.opened = {batch: [tuple(wave) for wave in waves] for batch, waves in opened.items()}

    def next(self, batch: int, groups: int, committed: Iterable[GroupId], *, streams: bool = True) -> OpenWave | None:
        """The next wave of a batch of ``groups`` that opens now, None if none does; no wave has those ``committed`` yet.

        Without ``streams`` it takes all groups that are left, once they are complete.
        """
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
        """Waves of a batch whose gradient was added."""
        return self._trained.get(batch, 0)

    @property
    def waiting(self) -> list[int]:
        """Batches of which a wave is parked."""
        return sorted({batch for batch, _ in self._parked})

    def forget(self, batch: int) -> None:
        """The batch is long done."""
        self.opened.pop(batch, None)
        self._trained.pop(batch, None)

    def _open(self, command: OpenWave) -> OpenWave:
        self._parked.discard((command.batch, command.wave))
        self.opened.setdefault(command.batch, []).append(command.members)
        return command
