"""The load of each engine: remaining seconds and KV demand of the trajectories at home there, by their forecasts.

An engine generates one token per step for every running trajectory, and a step takes a + b x (number running) + c x (context of
all) seconds. So the longest ends after a x (steps) + b x (tokens left of all) + c x (sum over all of tokens left x mean context):
`finish_s`. The number of steps is the tokens left of the longest, or more if slots are too few. Forecasts err, and some of
many trajectories with short forecasts become long: for the first placement the longest is replaced by the `UNSURE`-norm of
the tokens left of all, which equals the longest if one stands out, and exceeds it if there are many. A trajectory goes
where the end is soonest. This yields the boundaries between buckets: long trajectories go to fast engines as far as those
have the capacity, and the longest share their engine with few. There are no fixed lengths. A later move must pay off for
the longest itself: by the norm nearly every move would, and most would be mistakes.

Seconds are compared with seconds only. They need a declared engine (`WorkerJoined.declared`); for other engines no end is
known, and a query is a bug. Without a forecast there is only a pace in seconds per token, which is compared with paces.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ): its boundaries are fixed lengths, and its moves are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from libra.facts import WorkerCapacity
from libra.policy.fleet import Fleet
from libra.policy.kv_profile import Demand, peak_tokens
from libra.policy.move_price import TransferPace, priced
from libra.policy.placements import Move, Place

UNSURE, SURE = 3.0, 64.0
"""Exponents of the norm. The longest alone overrates a predictor whose forecasts correlate with the truth by 0.6: 2 to 5 % of the
makespan at 4 and 12 trajectories per GPU. For exact lengths the longest is right."""
THOUSANDS = 1e-3
STANDS_OUT = 0.999
"""A member with more than this share of the sum: the rest is summed again, because the difference would lose digits."""
GROWTH_HELD_FREE = 0.7
"""KV memory is reserved for this share of the growth of contexts: those of one engine do not all end at once."""
PAYS_FACTOR = 2.0
"""A move must save this many times its cost in seconds: forecasts err, and two moves that cancel out must not pay off."""
SOONER_FACTOR = 0.95
"""A move must reduce the seconds until both engines finish to this share."""
QUICKER_FRAC = 0.2
"""A move for the trajectory alone must save this share of its seconds per token."""
GROWTH_STEPS = 16
"""Growth of contexts is rounded to this part of a token: every quantum changes the mean, and hardly any the answer."""
FOREVER = 1e12
"""Tokens left of a trajectory without a forecast: nobody knows when it ends."""
LESS, MORE, LEAST_SHARE = 0.98, 0.002, 0.5
"""The share of an engine's memory that those who begin may plan with: times the first whenever a context is pushed out, plus the
second whenever a trajectory ends or leaves, and never below the third. Forecasts that are too short, and turns whose length nobody
knows, so reserve the memory that they turn out to take."""
LOOKED_AT = 4
"""Candidate engines of a move: those that finish first."""
LISTED_EVERY = 64
"""Queries between two updates of the candidates."""


class _Refused(NamedTuple):
    """One that did not fit into ``capacity``, at this growth of contexts and with this longest one."""

    demand: Demand
    growth: float
    capacity: float
    limit: int

    def covers(self, demand: Demand, growth: float, capacity: float, limit: int) -> bool:
        """Whether another one does not fit either, with the same members or more: it holds as much at every step, and as long."""
        (left, context, final), old = demand, self.demand
        return (
            growth >= self.growth
            and capacity <= self.capacity
            and limit == self.limit
            and left >= old.left
            and context >= old.context
            and (final - context) * old.left >= (old.final - old.context) * left
        )


@dataclass(slots=True)
class _Load:
    """Of one engine."""

    members: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # room, tokens left, work
    room: float = 0.0
    left: float = 0.0
    work: float = 0.0
    longest: float | None = 0.0  # None: not known, to be computed
    peak: float = 0.0  # sum of powers of tokens left
    groups: dict[str, int] = field(default_factory=dict)  # members of each
    share: float = 1.0  # of its memory that those who begin may plan with
    refused: _Refused | None = None  # since a member last changed


class Loads:
    """Forecast lengths of trajectories, and the engine loads that follow."""

    def __init__(self, fleet: Fleet, exponent: float = UNSURE) -> None:
        self._fleet, self._exponent = fleet, exponent
        self._loads: dict[str, _Load] = {}
        self._home: dict[str, str] = {}
        self._group: dict[str, str] = {}
        self._left: dict[str, tuple[float, float]] = {}  # tokens left, context at the end
        self._mean_final = 0.0
        self._num_ended = 0
        self._sampled = self._grown = 0.0  # tokens generated, and context that came with them
        self._prompts, self._mean_prompt = set[str](), 0.0  # trajectories whose prompt is known
        self._num_prompts = self._num_told = 0
        self._mean_told = 0.0  # first forecasts
        self._idlest: list[str] = []
        self.transfers = TransferPace()
        self._changes = 0

    def join(self, key: str, group: str) -> None:
        """``key`` is a member of ``group``, whose lengths are correlated."""
        if group:
            self._group[key] = group

    def siblings(self, key: str, worker: str) -> int:
        """How many of its group are at home on ``worker``."""
        load, group = self._loads.get(worker), self._group.get(key)
        return load.groups.get(group, 0) if load is not None and group is not None else 0

    def set_forecast(self, key: str, left_tokens: float, final_tokens: float) -> None:
        """Forecast: ``key`` generates ``left_tokens`` more and ends with a context of ``final_tokens``, each at most the longest
        context of any engine, so that a high first forecast leaves none empty."""
        is_first = key not in self._left
        left_tokens = self._believe(key, left_tokens, final_tokens)
        if is_first:
            self._num_told += 1
            self._mean_told += (left_tokens - self._mean_told) / self._num_told

    def _believe(self, key: str, left_tokens: float, final_tokens: float) -> float:
        limit, home = self._fleet.max_context_tokens, self._home.get(key)
        if limit:
            final_tokens = min(final_tokens, limit)
            left_tokens = min(left_tokens, max(0.0, limit - self._fleet.context_tokens.get(key, 0)))
        self._left[key] = (left_tokens, final_tokens)
        if home is not None:
            self.settle(key, home)
        return left_tokens

    def parked(self, key: str, context_tokens: int) -> None:
        """``key`` has a context of so many tokens (0: not known); the first time, it shows the length of its prompt."""
        home = self._home.get(key)
        if context_tokens and home is not None and context_tokens != self._fleet.context_tokens.get(key):
            self._loads[home].refused = None
        if context_tokens and key not in self._prompts:
            self._prompts.add(key)
            self._num_prompts += 1
            prompt = max(0, context_tokens - self._fleet.context_tokens.get(key, 0))
            self._mean_prompt += (prompt - self._mean_prompt) / self._num_prompts

    def generated(self, key: str, tokens: int, payload_tokens: int = 0) -> None:
        """``key`` has generated ``tokens``, and its tools added others; its remaining tokens fall by the former."""
        self._sampled += tokens
        self._grown += tokens + payload_tokens
        forecast, home = self._left.get(key), self._home.get(key)
        if home is not None:
            load = self._loads[home]
            load.refused = None
            if tokens:
                load.members[key] = load.members.pop(key)  # the most recently used
        if forecast is not None and tokens:
            self._believe(key, max(0.0, forecast[0] - tokens), forecast[1])

    def settle(self, key: str, worker: str | None) -> None:
        """``key`` is at home on ``worker`` (None: nowhere)."""
        home = self._home.get(key)
        if home is not None:
            load = self._loads[home]
            if home == worker:
                self._change(key, load)
                return
            load.share, load.refused = min(1.0, load.share + MORE), None
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
        """Update the contribution of ``key`` to the load of its home."""
        old_room, old_left, old_work = load.members[key]
        left, work = self._work(key)
        room = self._room(key)
        load.members[key] = (room, left, work)
        if left != old_left:
            load.refused = None
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
        """The engine of ``worker`` has left."""
        for key in self._loads.pop(worker, _Load()).members:
            del self._home[key]

    def end(self, key: str) -> None:
        """``key`` has ended; its context enters the mean for those without a forecast."""
        self.settle(key, None)
        self._left.pop(key, None)
        self._group.pop(key, None)
        self._prompts.discard(key)
        final = self._fleet.context_tokens.get(key, 0)
        if final:
            self._num_ended += 1
            self._mean_final += (final - self._mean_final) / self._num_ended

    def fits(self, key: str, worker: str) -> bool:
        """Whether the KV of ``key`` fits beside that of all trajectories at home there, until the last of them ends.

        What they hold now is sure. What they will hold is forecast (`libra.policy.kv_profile`); without a forecast for ``key``,
        part of the growth of each is reserved. An engine that exchanges KV reserves nothing: what it drops comes back, and contexts
        need no memory while their tools run (`Host.open_tokens`).
        """
        host, load = self._fleet.hosts[worker], self._loads.get(worker)
        if not host.spec.kv_tokens or load is None or not load.members or key in load.members:
            return True
        capacity, context = load.share * host.spec.kv_tokens, self._context(key)
        if host.spec.kv_token_bytes or host.context_tokens + context > capacity:
            return bool(host.spec.kv_token_bytes) and host.context_tokens + context <= host.open_tokens
        if not self.has_forecast(key):
            return load.room + self._room(key) <= capacity
        growth, limit = self._growth(), self._fleet.max_context_tokens
        own = self._demand(key, growth)
        if host.context_tokens + growth * load.left + own.final <= capacity:
            return True
        if load.refused is not None and load.refused.covers(own, growth, capacity, limit):
            return False
        if peak_tokens([own, *(self._demand(member, growth) for member in load.members)]) <= capacity:
            return True
        load.refused = _Refused(own, growth, capacity, limit)
        return False

    def _context(self, key: str) -> float:
        """Tokens of context; before the first generation, the mean prompt's."""
        return self._fleet.context_tokens.get(key) or self._mean_prompt

    def _growth(self) -> float:
        """Tokens of context per token generated, payloads of tools included.

        Before anything is generated, contexts are believed to fill their slots: that is how many slots there are.
        """
        mean = self._mean_told
        grown = max(mean, self._fleet.slot_tokens - self._mean_prompt) + self._grown
        return round(GROWTH_STEPS * grown / max(1.0, mean + self._sampled)) / GROWTH_STEPS

    def _demand(self, key: str, growth: float) -> Demand:
        context, left = self._context(key), self._left.get(key, (0.0,))[0]
        if left <= 0.0:
            return Demand(FOREVER, context, context)
        final, limit = context + growth * left, self._fleet.max_context_tokens
        return Demand(left, context, max(context, min(final, limit)) if limit else final)

    def pushed_out(self, worker: str, running: Callable[[str], bool]) -> list[str]:
        """Those at home on ``worker`` whose KV its engine drops for that of the others, least recently used first.

        ``running`` are never dropped; the last one is kept, too.
        """
        host, load = self._fleet.hosts.get(worker), self._loads.get(worker)
        if host is None or load is None or not host.spec.kv_tokens:
            return []
        too_many, found = host.context_tokens - host.open_tokens, list[str]()
        for key in load.members:
            if too_many <= 0 or len(found) + 1 == len(load.members):
                break
            if not running(key):
                too_many -= self._fleet.context_tokens.get(key, 0)
                found.append(key)
                load.share = max(LEAST_SHARE, load.share * LESS)
        return found

    def has_forecast(self, key: str) -> bool:
        """Whether there is a forecast for ``key``."""
        return self._left.get(key, (0.0,))[0] > 0.0

    def finish_s(self, key: str, worker: str) -> float:
        """Seconds until ``worker`` (declared) finishes with ``key`` (forecast) at home there too."""
        load = self._loads.get(worker)
        left, work = self._work(key)
        if load is None:
            return self._end_s(worker, left, left, work)
        if key in load.members:
            return self._end_s(worker, self._peak(load.peak), load.left, load.work)
        return self._end_s(worker, self._peak(load.peak + self._power(left)), load.left + left, load.work + work)

    def pace_s_per_token(self, key: str, worker: str) -> float:
        """Seconds per token on ``worker`` (declared) with ``key`` at home there too."""
        load = self._loads.get(worker)
        held, others = (load.room, len(load.members)) if load is not None else (0.0, 0)
        if load is not None and key in load.members:
            others -= 1
        else:
            held += self._room(key)
        return self._fleet.hosts[worker].s_per_token(held, others)

    def moved_s(self, key: str, worker: str) -> tuple[float, float, float]:
        """Seconds until the home of ``key`` finishes if it stays; until both engines finish if it moves to ``worker``, cost
        included; and that cost."""
        here_s, without_s = self._ends_here_s(key, self._home[key])
        price_s = self._price_s(key, worker)
        return here_s, max(without_s, self.finish_s(key, worker) + price_s), price_s

    def over_s(self, worker: str) -> float:
        """Seconds until ``worker`` (declared) finishes with those at home there."""
        load = self._loads.get(worker)
        return self._end_s(worker, self._longest(load), load.left, load.work) if load is not None else 0.0

    def mean_left(self, workers: Iterable[str]) -> int:
        """Mean forecast of tokens left of those at home on ``workers``; 0 if there are none."""
        left = [m[1] for w in workers if (load := self._loads.get(w)) is not None for m in load.members.values()]
        return round(sum(left) / len(left)) if left else 0

    def move(self, key: str, free: Mapping[str, int]) -> tuple[str, str] | None:
        """A better engine for ``key``, whose home has a free slot too, and the reason; None: it stays."""
        found, what = self.better_home(key, free), "both engines are over {} sooner"
        if found is None:
            found, what = self.quicker_home(key, free), "it is over {} sooner, and nobody later"
        return None if found is None else (found[0], f"move: {what.format(_seconds(found[1]))}")

    def better_home(self, key: str, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a free slot on which ``key`` makes both engines finish sooner, and by how many seconds.

        None if no gain exceeds the cost of computing its context again.
        """
        home = self._home.get(key)
        if home is None or not self.has_forecast(key) or len(self._fleet.hosts) < 2 or not self._is_declared(home):
            return None
        here_s, without_s = self._ends_here_s(key, home)
        targets = self._first_over()
        if without_s > SOONER_FACTOR * here_s:
            return None
        for worker in targets:
            if worker == home or worker not in free or not self._is_declared(worker):
                continue
            sooner_s = self._sooner_s(key, worker, here_s, without_s)
            if sooner_s > 0.0 and self.fits(key, worker):
                return worker, sooner_s
        return None

    def quicker_home(self, key: str, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a spare slot on which ``key`` gains more time than all trajectories there lose, and by how
        many seconds.

        A spare slot is one that no trajectory at home there needs. Neither engine may finish later. The gain is per token, so that
        it holds for any length: a long trajectory with a short forecast would otherwise be the last, on the slower engine.
        None if there is no such engine, or if lengths are exact.
        """
        home = self._home.get(key)
        if self._exponent == SURE or home is None or not self.has_forecast(key) or not self._is_declared(home):
            return None
        here_s_per_token = self.pace_s_per_token(key, home)
        best: tuple[float, str] | None = None
        for worker in self._first_over():
            if worker == home or worker not in free or not self._is_declared(worker):
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

    def _is_declared(self, worker: str) -> bool:
        host = self._fleet.hosts.get(worker)
        return host is not None and host.declared

    def _ends_here_s(self, key: str, home: str) -> tuple[float, float]:
        """Seconds until the home of ``key`` finishes, with and without it."""
        load = self._loads[home]
        longest = self._longest(load)
        here_s = self._end_s(home, longest, load.left, load.work)
        _, own_left, own_work = load.members[key]
        if own_left == longest:
            longest = max((member[1] for other, member in load.members.items() if other != key), default=0.0)
        return here_s, self._end_s(home, longest, load.left - own_left, load.work - own_work)

    def _longest_with_s(self, key: str, worker: str) -> float:
        """`over_s` of ``worker`` with ``key`` at home there too."""
        load, (left, work) = self._loads.get(worker) or _Load(), self._work(key)
        return self._end_s(worker, max(self._longest(load), left), load.left + left, load.work + work)

    def _sooner_s(self, key: str, worker: str, here_s: float, without_s: float) -> float:
        """Seconds that a move to ``worker`` saves; 0 if that is too little for its cost and the error of forecasts."""
        price_s = self._price_s(key, worker)
        after_s = max(without_s, self.finish_s(key, worker) + price_s)
        if after_s > SOONER_FACTOR * here_s or here_s - after_s < PAYS_FACTOR * price_s:
            return 0.0
        return here_s - after_s

    def price(self, key: str, worker: str, last_home: WorkerCapacity | None = None) -> Move | None:
        """The price of ``worker`` as the new home of ``key``, whose KV is at its home or ``last_home``; None if that is nowhere or
        here."""
        hosts, home = self._fleet.hosts, self._fleet.home.get(key)
        spec = last_home if home is None else hosts[home].spec
        if spec is None or spec.worker == worker:
            return None
        return priced(self._fleet.context_tokens.get(key, 0), spec, hosts[worker].spec, self.transfers)

    def placed(self, place: Place, last_home: WorkerCapacity | None = None) -> Place:
        """The placement, with its price if it is a move between engines that exchange KV; its worker is the trajectory's home
        from now on."""
        move = self.price(place.key, place.worker, last_home)
        self.settle(place.key, place.worker)
        return place if move is None or move.transfer_s is None else msgspec.structs.replace(place, move=move)

    def _price_s(self, key: str, worker: str) -> float:
        move = self.price(key, worker)
        return 0.0 if move is None else move.seconds

    def _first_over(self) -> list[str]:
        """The declared engines that finish first, updated every `LISTED_EVERY` calls."""
        self._changes += 1
        if self._changes % LISTED_EVERY == 1 or not self._idlest:
            ends = [(self.over_s(worker), worker) for worker in self._fleet.hosts if self._is_declared(worker)]
            self._idlest = [worker for _, worker in sorted(ends)[:LOOKED_AT]]
        return self._idlest

    def _end_s(self, worker: str, longest: float, left: float, work: float) -> float:
        """Seconds until an engine finishes whose longest trajectory has ``longest`` tokens left, and all together ``left``."""
        host = self._fleet.hosts[worker]
        spec = host.spec
        steps = max(longest, left / max(1, spec.rollout_slots))
        return (
            (spec.alone_s_per_token - spec.beside_s_per_token) * steps
            + spec.beside_s_per_token * left
            + host.context_s_per_token * work
        )

    def _peak(self, power: float) -> float:
        return math.pow(max(0.0, power), 1.0 / self._exponent) / THOUSANDS

    def _power(self, left: float) -> float:
        return math.pow(left * THOUSANDS, self._exponent)

    def _without(self, load: _Load, left: float, key: str = "") -> float:
        """Sum of powers without a member that has ``left``: ``key``, or one that is removed already."""
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
    """Seconds as text, with at least two digits."""
    return f"{value:.0f} s" if value >= 10.0 else f"{value:.2g} s"
