"""A trajectory that has not ended, and an engine with the sums over the trajectories at home there.

An open trajectory with ``context`` tokens now and ``left`` to generate holds ``context + growth *
s`` tokens of KV after ``s`` steps. The memory of all is largest just before one ends:
`peak_tokens`.

Invariants
----------
1. The sums of an engine are the sums of its members' shares; an empty engine has none.
2. `Trajectory.home` is the engine among whose members it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from libra.facts import QuantumFinished, WorkerCapacity
from libra.types import Phase

REMEMBERED = 0.95
"""Weight of past generations, relative to the newest, in seconds of generations and tools."""
MOST_OPEN = 8.0  # caps KV overcommit of open contexts, however long tools take
NOISY_NORM, EXACT_NORM = 3.0, 64.0
"""Exponents of the norm (`libra.policy.engine_loads`), for forecasts and for exact lengths.

The longest alone overrates forecasts that correlate with the truth by 0.6.
"""
THOUSANDS = 1e-3
STANDS_OUT = 0.999
"""Above this share of the sum, the rest is summed again: the difference would lose digits."""
GROWTH_HELD_FREE = 0.7
"""KV memory is reserved for this share of growth: contexts do not all end at once."""
LESS, MORE, LEAST_SHARE = 0.98, 0.002, 0.5
"""The share of memory to plan with: times the first when a context is pushed out, plus the second
when a trajectory ends or leaves, at least the third. Short forecasts so reserve more memory."""


class Share(NamedTuple):
    """Addition to the sums of a home: reserved KV tokens, tokens left, times mean context."""

    room: float = 0.0
    left: float = 0.0
    work: float = 0.0


NO_SHARE = Share()


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory between its first event and its end."""

    key: str
    group: str = ""
    phase: Phase | None = None  # of its newest parking
    ranked: bool = False  # it has had a priority since then
    serial: int = 0  # of its entry in the heaps of its phase; 0: it does not wait
    waits_at: str = ""  # worker in whose queue it waits
    home: EngineState | None = None  # with its KV
    generates_at: EngineState | None = None  # in whose slot it is
    last_home: WorkerCapacity | None = None  # may still have its KV, while it has no home
    tool_home: str = ""  # worker of its newest action
    context_tokens: int = 0  # 0 before the first generation
    left_tokens: float = 0.0  # forecast
    final_tokens: float | None = None  # forecast of its context at the end
    begins_tp: int = 0  # degree planned for its beginning; 0: any
    buckets: tuple[str, ...] = ()  # whose slots it takes besides those at home
    has_prompt: bool = False  # the length of its prompt is known
    share: Share = NO_SHARE

    @property
    def has_forecast(self) -> bool:
        return self.left_tokens > 0.0

    def work(self, context_tokens: int | None = None) -> float:
        """Tokens left times the mean context while they are generated."""
        now = self.context_tokens if context_tokens is None else context_tokens
        return self.left_tokens * 0.5 * (now + (self.final_tokens or 0.0))


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine: its declaration, its present state, and the sums over its members."""

    spec: WorkerCapacity
    exponent: float = NOISY_NORM  # of the norm in ``peak``
    declared: bool = False
    context_s_per_token: float = 0.0  # derived once, for every comparison of engines
    running: int = 0  # generations in its slots
    context_tokens: int = 0  # of all members: the demand on its KV memory
    generated_s: float = 0.0  # of an engine that exchanges KV, decaying
    tools_s: float = 0.0  # as above
    members: dict[str, Trajectory] = field(default_factory=dict)  # the least recently used first
    room: float = 0.0
    left: float = 0.0
    work: float = 0.0
    longest: float | None = 0.0  # most tokens left, unless it must be computed
    peak: float = 0.0  # sum of powers of tokens left
    groups: dict[str, int] = field(default_factory=dict)  # members of each group
    share: float = 1.0  # of memory that new trajectories may plan with
    refused: Refused | None = None  # the newest that did not fit since a member changed

    def declare(self, spec: WorkerCapacity) -> None:
        self.spec, self.declared = spec, spec.declared
        self.context_s_per_token = spec.context_s_per_token if spec.declared else 0.0

    def add(self, one: Trajectory, mean_final: float) -> None:
        """``one`` is at home here; ``mean_final``: context at the end without a forecast."""
        one.home, self.members[one.key] = self, one
        self.context_tokens += one.context_tokens
        one.share = share = share_of(one, mean_final)
        self.room += share.room
        self.left += share.left
        self.work += share.work
        self.peak += self.power(share.left)
        self.refused = None
        if self.longest is not None:
            self.longest = max(self.longest, share.left)
        if one.group:
            self.groups[one.group] = self.groups.get(one.group, 0) + 1

    def remove(self, one: Trajectory) -> None:
        one.home = None
        del self.members[one.key]
        self.context_tokens -= one.context_tokens
        share, one.share = one.share, NO_SHARE
        self.share, self.refused = min(1.0, self.share + MORE), None
        self.room -= share.room
        self.left -= share.left
        self.work -= share.work
        self.peak = self._without(share.left, one)
        if share.left == self.longest:
            self.longest = None
        if not self.members:  # sums drift
            self.room = self.left = self.work = self.peak = 0.0
        if one.group:
            self.groups[one.group] -= 1
            if not self.groups[one.group]:
                del self.groups[one.group]

    def change(self, one: Trajectory, mean_final: float) -> None:
        old, share = one.share, share_of(one, mean_final)
        if share == old:
            return
        one.share = share
        self.room += share.room - old.room
        self.work += share.work - old.work
        if share.left == old.left:
            return
        self.refused = None
        self.left += share.left - old.left
        self.peak = self._without(old.left, one) + self.power(share.left)
        if self.longest is not None and share.left >= self.longest:
            self.longest = share.left
        elif old.left == self.longest:
            self.longest = None

    def power(self, left: float) -> float:
        return math.pow(left * THOUSANDS, self.exponent)

    def norm(self, peak: float) -> float:
        return math.pow(max(0.0, peak), 1.0 / self.exponent) / THOUSANDS

    def _without(self, left: float, one: Trajectory) -> float:
        power = self.power(left)
        if not power or power < STANDS_OUT * self.peak:
            return self.peak - power
        return sum(self.power(other.share.left) for other in self.members.values() if other is not one)

    def longest_left(self, but: Trajectory | None = None) -> float:
        if self.longest is None:
            self.longest = max((each.share.left for each in self.members.values()), default=0.0)
        if but is None or but.share.left != self.longest:
            return self.longest
        return max((each.share.left for each in self.members.values() if each is not but), default=0.0)

    def pushed_out(self, running: Callable[[str], bool]) -> list[Trajectory]:
        """Members whose KV the engine drops, least recently used first; never the last one."""
        too_many, found = self.context_tokens - self.open_tokens, list[Trajectory]()
        if not self.spec.kv_tokens:
            return found
        for key, one in self.members.items():
            if too_many <= 0 or len(found) + 1 == len(self.members):
                break
            if not running(key):
                too_many -= one.context_tokens
                found.append(one)
                self.share = max(LEAST_SHARE, self.share * LESS)
        return found

    @property
    def open_tokens(self) -> float:
        """Tokens of context that may be open; where KV is exchanged, more by the time of tools."""
        spec = self.spec
        if not spec.kv_token_bytes or not self.tools_s:
            return spec.kv_tokens
        return spec.kv_tokens * min(MOST_OPEN, 1.0 + self.tools_s / max(self.generated_s, 1e-9))

    def took(self, event: QuantumFinished) -> None:
        if not self.spec.kv_token_bytes:
            return
        if event.phase is Phase.TOOL:
            self.tools_s += event.latency_s
        else:
            own_s = self.generation_s(event.tokens, max(0.0, event.latency_s - event.tools_s))
            self.generated_s = REMEMBERED * self.generated_s + own_s
            self.tools_s = REMEMBERED * self.tools_s + min(event.tools_s, event.latency_s)

    def generation_s(self, tokens: int, most_s: float) -> float:
        """Seconds of ``tokens`` beside members that fit, at most ``most_s`` with its waits."""
        if not self.declared:
            return most_s
        fits = min(1.0, self.spec.kv_tokens / max(1, self.context_tokens))
        others = max(0, round(fits * self.running) - 1)
        return min(most_s, tokens * self.s_per_token(fits * self.context_tokens, others))

    def s_per_token(self, held_tokens: float, others: int) -> float:
        """Seconds per token beside ``others`` generations, with these tokens of context in all."""
        spec = self.spec
        beside = min(others, max(0, spec.rollout_slots - 1))
        return spec.alone_s_per_token + spec.beside_s_per_token * beside + self.context_s_per_token * held_tokens

    def end_s(self, longest: float, left: float, work: float) -> float:
        """Seconds until it finishes, for these tokens left of the longest, and of all."""
        spec = self.spec
        steps = max(longest, left / max(1, spec.rollout_slots))
        step_s = spec.alone_s_per_token - spec.beside_s_per_token
        return step_s * steps + spec.beside_s_per_token * left + self.context_s_per_token * work


def share_of(one: Trajectory, mean_final: float) -> Share:
    tokens, final = one.context_tokens, one.final_tokens
    held = GROWTH_HELD_FREE * max(0.0, (mean_final if final is None else final) - tokens)
    return Share(tokens + held, one.left_tokens, one.work())


FOREVER = 1e12  # tokens left of a trajectory without a forecast


class Demand(NamedTuple):
    """One trajectory's KV: ``context`` tokens now, and ``final`` after ``left`` steps."""

    left: float
    context: float
    final: float

    @classmethod
    def of(cls, context: float, left: float, growth: float, limit: int) -> Demand:
        """A trajectory with ``left`` tokens to generate; 0 for it or ``limit``: not known."""
        if left <= 0.0:
            return cls(FOREVER, context, context)
        final = context + growth * left
        return cls(left, context, max(context, min(final, limit)) if limit else final)


class Refused(NamedTuple):
    """A demand that did not fit into ``capacity``, at this growth and limit of contexts."""

    demand: Demand
    growth: float
    capacity: float
    limit: int

    def covers(self, demand: Demand, growth: float, capacity: float, limit: int) -> bool:
        (left, context, final), old = demand, self.demand
        tighter = growth >= self.growth and capacity <= self.capacity and limit == self.limit
        steeper = (final - context) * old.left >= (old.final - old.context) * left
        return tighter and left >= old.left and context >= old.context and steeper


def peak_tokens(demands: Iterable[Demand]) -> float:
    """The most tokens that all hold together until the last one has ended. O(n log n)."""
    peak = contexts = rates = 0.0
    for left, context, final in sorted(demands, reverse=True):
        rate = (final - context) / left if left > 0.0 else 0.0
        contexts += context if left > 0.0 else final
        rates += rate
        peak = max(peak, contexts + rates * left)
    return peak
