"""What each engine has still to do and to hold for the trajectories that are at home there, as far as it is believed.

An engine gives every running trajectory a token per step, and a step takes a + c x (context of all of them) seconds. So the
longest of them ends after a x (its tokens) + c x (sum over all of tokens left x context meanwhile): `finish_s`. A trajectory is
put where that is least, which spreads the load and leaves the longest ones room to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.policy.fleet import Fleet

GROWTH_HELD_FREE = 0.6
"""Share of the growth of contexts that KV memory is held free for: those of one engine do not all end at once."""


@dataclass(slots=True)
class _Load:
    """Of one engine."""

    members: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # room, tokens left, work
    room: float = 0.0
    work: float = 0.0
    longest: float | None = 0.0  # None: to be looked up


class Loads:
    """Believed lengths of trajectories, and the loads of engines that follow."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loads: dict[str, _Load] = {}
        self._home: dict[str, str] = {}
        self._left: dict[str, tuple[float, float]] = {}  # tokens left, context at the end
        self._mean_final = 0.0
        self._num_ended = 0

    def believe(self, key: str, left_tokens: float, final_tokens: float) -> None:
        """``key`` is believed to generate ``left_tokens`` more and to end with a context of ``final_tokens``."""
        self._left[key] = (left_tokens, final_tokens)
        home = self._home.get(key)
        if home is not None:
            self.settle(key, home)

    def generated(self, key: str, tokens: int) -> None:
        """``key`` has ``tokens`` less to go."""
        believed = self._left.get(key)
        if believed is not None and tokens:
            self.believe(key, max(0.0, believed[0] - tokens), believed[1])

    def settle(self, key: str, worker: str | None) -> None:
        """``key`` is at home on ``worker`` (None: nowhere)."""
        home = self._home.pop(key, None)
        if home is not None and (load := self._loads.get(home)) is not None:
            room, left, work = load.members.pop(key)
            load.room -= room
            load.work -= work
            if left == load.longest:
                load.longest = None
        if worker is None or worker not in self._fleet.hosts:
            return
        self._home[key] = worker
        load = self._loads.setdefault(worker, _Load())
        left, work = self._work(key)
        room = self._room(key)
        load.members[key] = (room, left, work)
        load.room += room
        load.work += work
        if load.longest is not None:
            load.longest = max(load.longest, left)

    def lose(self, worker: str) -> None:
        """The engine of ``worker`` is gone."""
        for key in self._loads.pop(worker, _Load()).members:
            del self._home[key]

    def end(self, key: str) -> None:
        """``key`` is over; how far it came is what others are believed to come to."""
        self.settle(key, None)
        self._left.pop(key, None)
        final = self._fleet.context_tokens.get(key, 0)
        if final:
            self._num_ended += 1
            self._mean_final += (final - self._mean_final) / self._num_ended

    def fits(self, key: str, worker: str) -> bool:
        """Whether the KV of ``key`` fits beside that of all who are at home there, with part of what all have yet to grow by."""
        capacity = self._fleet.hosts[worker].spec.kv_tokens
        load = self._loads.get(worker)
        if not capacity or load is None or not load.members or key in load.members:
            return True
        return load.room + self._room(key) <= capacity

    def finish_s(self, key: str, worker: str) -> float:
        """Seconds until the longest trajectory of ``worker`` ends, were ``key`` at home there too.

        Where nothing is believed of ``key``: seconds per token there, by what it holds.
        """
        host, load = self._fleet.hosts[worker], self._loads.get(worker)
        if key not in self._left or not host.spec.kv_tokens:
            return host.token_s(self._room(key), load.room if load is not None else 0.0)
        left, work = self._work(key)
        longest = 0.0
        if load is not None:
            if load.longest is None:
                load.longest = max((member[1] for member in load.members.values()), default=0.0)
            longest, work = load.longest, work + load.work
        spec = host.spec
        return spec.token_s * max(left, longest) + (spec.token_full_s - spec.token_s) / spec.kv_tokens * work

    def _work(self, key: str) -> tuple[float, float]:
        left, final = self._left.get(key, (0.0, 0.0))
        return left, left * 0.5 * (self._fleet.context_tokens.get(key, 0) + final)

    def _room(self, key: str) -> float:
        tokens = self._fleet.context_tokens.get(key, 0)
        final = self._left[key][1] if key in self._left else self._mean_final
        return tokens + GROWTH_HELD_FREE * max(0.0, final - tokens)
