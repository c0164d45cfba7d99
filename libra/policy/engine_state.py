"""A trajectory that has not ended, and an engine with the sums over the trajectories at home there.

Invariants
----------
1. The sums of an engine are those of its members' shares; an empty engine has none.
2. `Trajectory.home` is the engine among whose members it is.

KV memory of an engine over time, as forecasts have it: contexts grow, and trajectories that end release theirs. Pure arithmetic.

Every open trajectory gains one token of its own per step, and with it ``growth`` tokens of context. So one with ``context``
now and ``left`` tokens to generate holds ``context + growth * s`` after ``s`` of its steps, until ``s = left``. The memory of all
is largest just before one of them ends: `peak_tokens`. Steps in which a trajectory waits or calls a tool are left out.

"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from libra.facts import QuantumFinished, WorkerCapacity
from libra.types import Phase

REMEMBERED = 0.95
"""Weight of an engine's past generations, relative to its newest, in the seconds that generations and tools take."""
MOST_OPEN = 8.0
"""Open contexts hold at most so many times the tokens that fit into memory, however long tools take."""
UNSURE, SURE = 3.0, 64.0
"""Exponents of the norm (`libra.policy.engine_loads`). The longest alone overrates a predictor whose forecasts correlate with the
truth by 0.6: 2 to 5 % of the makespan . For exact lengths the longest is right."""
THOUSANDS = 1e-3
STANDS_OUT = 0.999
"""A member with more than this share of the sum: the rest is summed again, because the difference would lose digits."""
GROWTH_HELD_FREE = 0.7
"""KV memory is reserved for this share of the growth of contexts: those of one engine do not all end at once."""
LESS, MORE, LEAST_SHARE = 0.98, 0.002, 0.5
"""The share of an engine's memory that new trajectories may plan with: times the first whenever a context is pushed out, plus the
second whenever a trajectory ends or leaves, and never below the third. So forecasts that are too short reserve more memory."""


class Share(NamedTuple):
    """What a trajectory adds to the sums of its home: reserved KV tokens, tokens left, and their product with the mean context."""

    room: float = 0.0
    left: float = 0.0
    work: float = 0.0


NO_SHARE = Share()


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory between its first event and its end.

    Attributes
    ----------
    phase : Phase or None
        Of its newest parking.
    ranked : bool
        Whether it has had a priority since then.
    serial : int
        Of its entry in the heaps of its phase; 0: it does not wait.
    waits_at : str
        Worker in whose queue it waits; empty: in no worker's.
    home, generates_at : EngineState or None
        The engine with its KV, and the one in whose slot it is.
    last_home : WorkerCapacity or None
        While it has no home: an engine that may still have its KV.
    tool_home : str
        Worker of its newest action.
    context_tokens : int
        Context so far; 0 before the first generation.
    left_tokens, final_tokens : float
        Forecast: tokens that it still generates, and its context at the end (None: there is no forecast).
    begins_tp : int
        Tensor-parallel degree planned for its beginning; 0: any.
    buckets : tuple of str
        Buckets whose slots it takes besides those of its home.
    has_prompt : bool
        Whether the length of its prompt is known.
    share : Share
        Its part in the sums of its home.
    """

    key: str
    group: str = ""
    phase: Phase | None = None
    ranked: bool = False
    serial: int = 0
    waits_at: str = ""
    home: EngineState | None = None
    generates_at: EngineState | None = None
    last_home: WorkerCapacity | None = None
    tool_home: str = ""
    context_tokens: int = 0
    left_tokens: float = 0.0
    final_tokens: float | None = None
    begins_tp: int = 0
    buckets: tuple[str, ...] = ()
    has_prompt: bool = False
    share: Share = NO_SHARE

    @property
    def has_forecast(self) -> bool:
        """Whether it is expected to generate more."""
        return self.left_tokens > 0.0

    def work(self, context_tokens: int | None = None) -> float:
        """Tokens left times the mean context while they are generated."""
        now = self.context_tokens if context_tokens is None else context_tokens
        return self.left_tokens * 0.5 * (now + (self.final_tokens or 0.0))


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine: its declaration, its present state, and the sums over the trajectories at home there.

    Attributes
    ----------
    spec : WorkerCapacity
    exponent : float
        Of the norm in ``peak``.
    declared : bool
    context_s_per_token : float
        Of ``spec``, which derives them; every comparison of engines reads them.
    running : int
        Generations in its slots.
    context_tokens : int
        Context of all members, running or not: the demand on its KV memory.
    generated_s, tools_s : float
        Seconds that generations of members took, without waits for memory, and their tools, inline or not; the newest with most
        weight. Of an engine that exchanges KV, else 0.
    members : dict of str to Trajectory
        Those at home there, the least recently used first.
    room, left, work : float
        Sums of their shares. ``peak`` sums powers of tokens left; ``longest`` is the most tokens left (None: to be computed).
    groups : dict of str to int
        Members of each group.
    share : float
        Share of its memory that new trajectories may plan with.
    refused : Refused or None
        The newest one that did not fit, since a member last changed.
    """

    spec: WorkerCapacity
    exponent: float = UNSURE
    declared: bool = False
    context_s_per_token: float = 0.0
    running: int = 0
    context_tokens: int = 0
    generated_s: float = 0.0
    tools_s: float = 0.0
    members: dict[str, Trajectory] = field(default_factory=dict)
    room: float = 0.0
    left: float = 0.0
    work: float = 0.0
    longest: float | None = 0.0
    peak: float = 0.0
    groups: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    refused: Refused | None = None

    def declare(self, spec: WorkerCapacity) -> None:
        """Take a new declaration."""
        self.spec, self.declared = spec, spec.declared
        self.context_s_per_token = spec.context_s_per_token if spec.declared else 0.0

    # ---------------------------------------------------------------- members

    def add(self, one: Trajectory, mean_final: float) -> None:
        """``one`` is at home here; ``mean_final``: context at the end of a trajectory without a forecast."""
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
        """``one`` has another home, or none."""
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
        """The context or the forecast of a member has changed."""
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
        """A member's part in `peak`."""
        return math.pow(left * THOUSANDS, self.exponent)

    def norm(self, peak: float) -> float:
        """Tokens left of the longest, as the norm of a sum of powers has it."""
        return math.pow(max(0.0, peak), 1.0 / self.exponent) / THOUSANDS

    def _without(self, left: float, one: Trajectory) -> float:
        """Sum of powers without ``one``, which has ``left``."""
        power = self.power(left)
        if not power or power < STANDS_OUT * self.peak:
            return self.peak - power
        return sum(self.power(other.share.left) for other in self.members.values() if other is not one)

    def longest_left(self, but: Trajectory | None = None) -> float:
        """The most tokens left of a member, or of one other than ``but``."""
        if self.longest is None:
            self.longest = max((each.share.left for each in self.members.values()), default=0.0)
        if but is None or but.share.left != self.longest:
            return self.longest
        return max((each.share.left for each in self.members.values() if each is not but), default=0.0)

    def pushed_out(self, running: Callable[[str], bool]) -> list[Trajectory]:
        """Members whose KV the engine drops for that of the others, the least recently used first; those that are ``running``,
        and the last one, are kept."""
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

    # ---------------------------------------------------------------- speed and memory

    @property
    def open_tokens(self) -> float:
        """Tokens of context that may be open there, 0 if not known: what its memory holds, and where KV is exchanged more by the
        seconds of tools over those of generations, for a context needs no memory while its tools run."""
        spec = self.spec
        if not spec.kv_token_bytes or not self.tools_s:
            return spec.kv_tokens
        return spec.kv_tokens * min(MOST_OPEN, 1.0 + self.tools_s / max(self.generated_s, 1e-9))

    def took(self, event: QuantumFinished) -> None:
        """A quantum of a member has ended."""
        if not self.spec.kv_token_bytes:
            return
        if event.phase is Phase.TOOL:
            self.tools_s += event.latency_s
        else:
            own_s = self.generation_s(event.tokens, max(0.0, event.latency_s - event.tools_s))
            self.generated_s = REMEMBERED * self.generated_s + own_s
            self.tools_s = REMEMBERED * self.tools_s + min(event.tools_s, event.latency_s)

    def generation_s(self, tokens: int, most_s: float) -> float:
        """Seconds of ``tokens`` beside those that its memory holds, at most ``most_s``, which may include a wait for memory."""
        if not self.declared:
            return most_s
        fits = min(1.0, self.spec.kv_tokens / max(1, self.context_tokens))
        others = max(0, round(fits * self.running) - 1)
        return min(most_s, tokens * self.s_per_token(fits * self.context_tokens, others))

    def s_per_token(self, held_tokens: float, others: int) -> float:
        """Seconds per token beside ``others`` generations, with ``held_tokens`` of context in all; `spec` is declared."""
        spec = self.spec
        beside = min(others, max(0, spec.rollout_slots - 1))
        return spec.alone_s_per_token + spec.beside_s_per_token * beside + self.context_s_per_token * held_tokens

    def end_s(self, longest: float, left: float, work: float) -> float:
        """Seconds until it finishes if the longest has ``longest`` tokens left, and all together ``left``."""
        spec = self.spec
        steps = max(longest, left / max(1, spec.rollout_slots))
        return (
            (spec.alone_s_per_token - spec.beside_s_per_token) * steps
            + spec.beside_s_per_token * left
            + self.context_s_per_token * work
        )


def share_of(one: Trajectory, mean_final: float) -> Share:
    tokens, final = one.context_tokens, one.final_tokens
    held = GROWTH_HELD_FREE * max(0.0, (mean_final if final is None else final) - tokens)
    return Share(tokens + held, one.left_tokens, one.work())


FOREVER = 1e12
"""Tokens left of a trajectory without a forecast: nobody knows when it ends."""


class Demand(NamedTuple):
    """One trajectory's KV: ``context`` tokens now, ``left`` steps until it ends, ``final`` tokens then."""

    left: float
    context: float
    final: float

    @classmethod
    def of(cls, context: float, left: float, growth: float, limit: int) -> Demand:
        """A trajectory with ``left`` tokens to generate, on engines with contexts up to ``limit``; 0 for either: not known."""
        if left <= 0.0:
            return cls(FOREVER, context, context)
        final = context + growth * left
        return cls(left, context, max(context, min(final, limit)) if limit else final)


class Refused(NamedTuple):
    """A demand that did not fit into ``capacity``, at this growth of contexts and with this longest one."""

    demand: Demand
    growth: float
    capacity: float
    limit: int

    def covers(self, demand: Demand, growth: float, capacity: float, limit: int) -> bool:
        """Whether another demand does not fit either, beside the same members or more: it holds as much at every step, and as
        long."""
        (left, context, final), old = demand, self.demand
        return (
            growth >= self.growth
            and capacity <= self.capacity
            and limit == self.limit
            and left >= old.left
            and context >= old.context
            and (final - context) * old.left >= (old.final - old.context) * left
        )


def peak_tokens(demands: Iterable[Demand]) -> float:
    """The most tokens that all hold together until the last one has ended; 0 without any. O(n log n)."""
    peak = contexts = rates = 0.0
    for left, context, final in sorted(demands, reverse=True):
        rate = (final - context) / left if left > 0.0 else 0.0
        contexts += context if left > 0.0 else final
        rates += rate
        peak = max(peak, contexts + rates * left)
    return peak
