"""What each engine has still to do and to hold for the trajectories that are at home there, as far as it is believed.

An engine gives every running trajectory a token per step, and a step takes a + b x (how many run) + c x (context of all of them)
seconds. So the longest of them ends after a x (steps) + b x (tokens left of all) + c x (sum over all of tokens left x context
meanwhile): `finish_s`. There are as many steps as the longest has tokens left, or more where the slots are too few. Beliefs err,
and of many that are believed to be short one is long: where a trajectory goes first, the longest is taken to be the `UNSURE`-norm
of what all there have left, which is the longest where one stands out, and more than it where there are many. It goes where the
end is soonest. That is where the boundaries between buckets come from: the longer ones go to the faster engines as far as those
have the capacity, and the longest ones share their engine with few. Nothing is decided by fixed lengths. A move later must pay
for the longest itself: by the norm nearly every move would, and most would be mistakes.

All of this is seconds, and compared with seconds. It needs what engines declare: of one that has told nothing (`WorkerJoined.told`)
no end is known, and whoever asks for one is wrong. Where nothing is believed of a trajectory there is only a pace, in seconds per
token, which is compared with paces.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ), whose boundaries are fixed lengths and whose moves are free of charge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from libra.policy.fleet import Fleet

UNSURE, SURE = 3.0, 64.0
"""Exponents. With the longest alone, a predictor whose forecasts correlate with the truth by 0.6 is believed too much: 2 to 5 % of
the makespan at 4 and 12 trajectories per GPU of `benchmarks.cmlfq_sim`. For who knows the lengths the longest is right."""
THOUSANDS = 1e-3
STANDS_OUT = 0.999
"""Share of the sum from which on the sum without a member is added up anew: too few digits of the difference would be right."""
GROWTH_HELD_FREE = 0.7
"""Share of the growth of contexts that KV memory is held free for: those of one engine do not all end at once."""
PAYS_FACTOR = 2.0
"""A move must save this many times the seconds it costs: forecasts err, and two moves that cancel out must not pay."""
SOONER_FACTOR = 0.95
"""A move must bring the end of the two engines' longest trajectory down to this share."""
QUICKER_FRAC = 0.2
"""A move for its own sake must save this share of the seconds per token at home."""
LOOKED_AT = 4
"""Engines that a move is considered to: those that are over first."""
LISTED_EVERY = 64
"""Changes of homes between two looks at all engines for those."""


@dataclass(slots=True)
class _Load:
    """Of one engine."""

    members: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # room, tokens left, work
    room: float = 0.0
    left: float = 0.0
    work: float = 0.0
    longest: float | None = 0.0  # None: to be looked up
    peak: float = 0.0  # sum of powers of tokens left
    groups: dict[str, int] = field(default_factory=dict)  # members of each


class Loads:
    """Believed lengths of trajectories, and the loads of engines that follow."""

    def __init__(self, fleet: Fleet, exponent: float = UNSURE) -> None:
        self._fleet, self._exponent = fleet, exponent
        self._loads: dict[str, _Load] = {}
        self._home: dict[str, str] = {}
        self._group: dict[str, str] = {}
        self._left: dict[str, tuple[float, float]] = {}  # tokens left, context at the end
        self._mean_final = 0.0
        self._num_ended = 0
        self._idlest: list[str] = []
        self._changes = 0

    def join(self, key: str, group: str) -> None:
        """``key`` is one of ``group``, whose lengths go together."""
        if group:
            self._group[key] = group

    def siblings(self, key: str, worker: str) -> int:
        """How many of its group are at home on ``worker``."""
        load, group = self._loads.get(worker), self._group.get(key)
        return load.groups.get(group, 0) if load is not None and group is not None else 0

    def believe(self, key: str, left_tokens: float, final_tokens: float) -> None:
        """``key`` is believed to generate ``left_tokens`` more and to end with a context of ``final_tokens``: no more than engines
        let a context grow to, so that a first guess of great lengths does not keep engines of short contexts empty."""
        limit = self._fleet.max_context_tokens
        if limit:
            final_tokens = min(final_tokens, limit)
            left_tokens = min(left_tokens, max(0.0, limit - self._fleet.context_tokens.get(key, 0)))
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
        home = self._home.get(key)
        if home is not None:
            load = self._loads[home]
            if home == worker:
                self._change(key, load)
                return
            del self._home[key]
            room, left, work = load.members.pop(key)
            load.room -= room
            load.left -= left
            load.work -= work
            load.peak = self._without(load, left)
            if left == load.longest:
                load.longest = None
            self._count(key, load, -1)
        if worker is None or worker not in self._fleet.hosts:
            return
        self._home[key] = worker
        load = self._loads.setdefault(worker, _Load())
        left, work = self._work(key)
        room = self._room(key)
        load.members[key] = (room, left, work)
        load.room += room
        load.left += left
        load.work += work
        load.peak += self._power(left)
        if load.longest is not None:
            load.longest = max(load.longest, left)
        self._count(key, load, 1)

    def _count(self, key: str, load: _Load, more: int) -> None:
        group = self._group.get(key)
        if group is not None:
            count = load.groups[group] = load.groups.get(group, 0) + more
            if not count:
                del load.groups[group]

    def _change(self, key: str, load: _Load) -> None:
        """``key`` stays where it is, and counts for what it is believed to be now."""
        old_room, old_left, old_work = load.members[key]
        left, work = self._work(key)
        room = self._room(key)
        load.members[key] = (room, left, work)
        load.room += room - old_room
        load.left += left - old_left
        load.work += work - old_work
        load.peak = self._without(load, old_left, key) + self._power(left)
        if load.longest is not None:
            if left >= load.longest:
                load.longest = left
            elif old_left == load.longest:
                load.longest = None

    def lose(self, worker: str) -> None:
        """The engine of ``worker`` is gone."""
        for key in self._loads.pop(worker, _Load()).members:
            del self._home[key]

    def end(self, key: str) -> None:
        """``key`` is over; how far it came is what others are believed to come to."""
        self.settle(key, None)
        self._left.pop(key, None)
        self._group.pop(key, None)
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

    def believed(self, key: str) -> bool:
        """Whether anything is believed of what ``key`` has left."""
        return self._left.get(key, (0.0,))[0] > 0.0

    def finish_s(self, key: str, worker: str) -> float:
        """Seconds until ``worker``, which has told what it is, is over, were ``key`` at home there too, of which lengths are
        believed."""
        load = self._loads.get(worker)
        left, work = self._work(key)
        if load is None:
            return self._end_s(worker, left, left, work)
        if key in load.members:
            return self._end_s(worker, self._peak(load.peak), load.left, load.work)
        return self._end_s(worker, self._peak(load.peak + self._power(left)), load.left + left, load.work + work)

    def pace_s_per_token(self, key: str, worker: str) -> float:
        """Seconds per token on ``worker``, which has told what it is, were ``key`` at home there too."""
        load = self._loads.get(worker)
        held, others = (load.room, len(load.members)) if load is not None else (0.0, 0)
        if load is not None and key in load.members:
            others -= 1
        else:
            held += self._room(key)
        return self._fleet.hosts[worker].s_per_token(held, others)

    def moved_s(self, key: str, worker: str) -> tuple[float, float, float]:
        """Seconds until the home of ``key`` is over if it stays, until both engines are if it moves to ``worker``, and the price of
        that, which is in the second."""
        here_s, without_s = self._ends_here_s(key, self._home[key])
        price_s = self._price_s(key, worker)
        return here_s, max(without_s, self.finish_s(key, worker) + price_s), price_s

    def over_s(self, worker: str) -> float:
        """Seconds until ``worker``, which has told what it is, is over with those that are at home there."""
        load = self._loads.get(worker)
        return self._end_s(worker, self._longest(load), load.left, load.work) if load is not None else 0.0

    def mean_left(self, workers: Iterable[str]) -> int:
        """Tokens that those at home on ``workers`` are believed to have left, on average; 0 where there are none."""
        left = [m[1] for w in workers if (load := self._loads.get(w)) is not None for m in load.members.values()]
        return round(sum(left) / len(left)) if left else 0

    def move(self, key: str, free: Mapping[str, int]) -> tuple[str, str] | None:
        """Where ``key``, whose home has a free slot too, had better go, and why; None: it stays."""
        found, what = self.better_home(key, free), "both engines are over {} sooner"
        if found is None:
            found, what = self.quicker_home(key, free), "it is over {} sooner, and nobody later"
        return None if found is None else (found[0], f"move: {what.format(_seconds(found[1]))}")

    def better_home(self, key: str, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a free slot, where ``key`` would bring the end of both engines forward, and by how many seconds.

        None where there is none for which that is worth computing its context again.
        """
        home = self._home.get(key)
        if home is None or not self.believed(key) or len(self._fleet.hosts) < 2 or not self._told(home):
            return None
        here_s, without_s = self._ends_here_s(key, home)
        targets = self._first_over()
        if without_s > SOONER_FACTOR * here_s:
            return None
        for worker in targets:
            if worker == home or worker not in free or not self._told(worker):
                continue
            sooner_s = self._sooner_s(key, worker, here_s, without_s)
            if sooner_s > 0.0 and self.fits(key, worker):
                return worker, sooner_s
        return None

    def quicker_home(self, key: str, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a slot to spare, where ``key`` wins more time than all there lose, and how many seconds that is.

        A slot to spare is one that nobody at home there needs. Neither engine may be over later. What is gained counts per token,
        so that it holds for any length: a trajectory that is believed to be short and is not would be the last one otherwise,
        on the slower engine. None where there is none, and where lengths are known.
        """
        home = self._home.get(key)
        if self._exponent == SURE or home is None or not self.believed(key) or not self._told(home):
            return None
        here_s_per_token = self.pace_s_per_token(key, home)
        best: tuple[float, str] | None = None
        for worker in self._first_over():
            if worker == home or worker not in free or not self._told(worker):
                continue
            host = self._fleet.hosts[worker]
            others_s_per_token = host.residents * host.spec.beside_s_per_token
            saved = here_s_per_token - self.pace_s_per_token(key, worker) - others_s_per_token
            if saved < QUICKER_FRAC * here_s_per_token or host.residents >= host.spec.rollout_slots:
                continue
            sooner_s, price_s = saved * self._left[key][0], self._price_s(key, worker)
            if sooner_s < PAYS_FACTOR * price_s or not self.fits(key, worker):
                continue
            here_s, without_s = self._ends_here_s(key, home)
            if max(without_s, self._longest_with_s(key, worker)) <= max(here_s, self.over_s(worker)):
                best = max(best or (0.0, ""), (sooner_s, worker))
        return None if best is None else (best[1], best[0])

    def _told(self, worker: str) -> bool:
        host = self._fleet.hosts.get(worker)
        return host is not None and host.spec.told

    def _ends_here_s(self, key: str, home: str) -> tuple[float, float]:
        """Seconds until the home of ``key`` is over, and until it were without it."""
        load = self._loads[home]
        longest = self._longest(load)
        here_s = self._end_s(home, longest, load.left, load.work)
        _, own_left, own_work = load.members[key]
        if own_left == longest:
            longest = max((member[1] for other, member in load.members.items() if other != key), default=0.0)
        return here_s, self._end_s(home, longest, load.left - own_left, load.work - own_work)

    def _longest_with_s(self, key: str, worker: str) -> float:
        """`over_s` of ``worker``, were ``key`` at home there too."""
        load, (left, work) = self._loads.get(worker) or _Load(), self._work(key)
        return self._end_s(worker, max(self._longest(load), left), load.left + left, load.work + work)

    def _sooner_s(self, key: str, worker: str, here_s: float, without_s: float) -> float:
        """Seconds that a move to ``worker`` saves; 0 where that is too little for its price, or for how far beliefs err."""
        price_s = self._price_s(key, worker)
        after_s = max(without_s, self.finish_s(key, worker) + price_s)
        if after_s > SOONER_FACTOR * here_s or here_s - after_s < PAYS_FACTOR * price_s:
            return 0.0
        return here_s - after_s

    def _price_s(self, key: str, worker: str) -> float:
        return self._fleet.context_tokens.get(key, 0) * self._fleet.hosts[worker].spec.prefill_s_per_token

    def _first_over(self) -> list[str]:
        """The engines that have least to do of those that told what they are, looked up now and then."""
        self._changes += 1
        if self._changes % LISTED_EVERY == 1 or not self._idlest:
            ends = [(self.over_s(worker), worker) for worker in self._fleet.hosts if self._told(worker)]
            self._idlest = [worker for _, worker in sorted(ends)[:LOOKED_AT]]
        return self._idlest

    def _end_s(self, worker: str, longest: float, left: float, work: float) -> float:
        """Seconds until an engine is over whose longest trajectory has ``longest`` tokens to go, and all together ``left``."""
        spec = self._fleet.hosts[worker].spec
        steps = max(longest, left / max(1, spec.rollout_slots))
        return (
            (spec.alone_s_per_token - spec.beside_s_per_token) * steps
            + spec.beside_s_per_token * left
            + spec.context_s_per_token * work
        )

    def _peak(self, power: float) -> float:
        return math.pow(max(0.0, power), 1.0 / self._exponent) / THOUSANDS

    def _power(self, left: float) -> float:
        return math.pow(left * THOUSANDS, self._exponent)

    def _without(self, load: _Load, left: float, key: str = "") -> float:
        """Sum of powers but for a member that has ``left``: ``key``, or one that is out already."""
        power = self._power(left)
        if not power or power < STANDS_OUT * load.peak:
            return load.peak - power
        return sum(self._power(member[1]) for other, member in load.members.items() if other != key)

    def _longest(self, load: _Load) -> float:
        if load.longest is None:
            load.longest = max((member[1] for member in load.members.values()), default=0.0)
        return load.longest

    def _work(self, key: str) -> tuple[float, float]:
        left, final = self._left.get(key, (0.0, 0.0))
        return left, left * 0.5 * (self._fleet.context_tokens.get(key, 0) + final)

    def _room(self, key: str) -> float:
        tokens = self._fleet.context_tokens.get(key, 0)
        final = self._left[key][1] if key in self._left else self._mean_final
        return tokens + GROWTH_HELD_FREE * max(0.0, final - tokens)


def _seconds(value: float) -> str:
    """Seconds for people, with two digits at least."""
    return f"{value:.0f} s" if value >= 10.0 else f"{value:.2g} s"
