"""Engines, the trajectories whose KV each holds (its members), and their sums, from events alone.

After ``s`` steps an open trajectory holds ``context + growth * s`` tokens of KV, until ``left``
tokens are generated. Total KV peaks just before a trajectory ends: `peak_tokens`.

Invariants
----------
1. A trajectory has at most one home: the present engine where it generated last, whose member it
   is. An engine that has left holds nothing.
2. The sums of an engine are the sums of its members' shares; an engine without members has none.
3. Seconds in `WorkerCapacity` come from the engine's measured passes: *alone* for one sequence
   without context, *full* for all slots with full KV memory; 0 before any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from libra.facts import (
    Fact,
    HomeForgotten,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.policy.engine_capacity import degree_of
from libra.types import Phase

REMEMBERED = 0.95  # weight of past generations, relative to the newest, in seconds
MOST_OPEN = 8.0  # caps KV overcommit of open contexts, however long tools take
NOISY_NORM, EXACT_NORM = 3.0, 64.0  # exponents of the norm, for forecasts and exact lengths
THOUSANDS = 1e-3
STANDS_OUT = 0.999  # above this share of the sum, the rest is summed again
GROWTH_HELD_FREE = 0.7  # reserved share of growth: contexts do not all end at once
LESS, MORE, LEAST_SHARE = 0.98, 0.002, 0.5
"""Share of memory to plan with: times LESS per evicted context, plus MORE per trajectory that ends,
at least LEAST_SHARE. So short forecasts reserve more memory."""


class Share(NamedTuple):
    """A trajectory's part in its home's sums."""

    room: float = 0.0
    left: float = 0.0
    work: float = 0.0


NO_SHARE = Share()


@dataclass(slots=True, eq=False)
class Trajectory:
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
        """Make ``one`` a member; without a forecast its last context is ``mean_final`` tokens."""
        one.home, self.members[one.key], self.refused = self, one, None
        self.context_tokens += one.context_tokens
        self._replace(one, share_of(one, mean_final))
        if one.group:
            self.groups[one.group] = self.groups.get(one.group, 0) + 1

    def remove(self, one: Trajectory) -> None:
        one.home, self.refused = None, None
        del self.members[one.key]
        self.context_tokens -= one.context_tokens
        self.share = min(1.0, self.share + MORE)
        self._replace(one, NO_SHARE)
        if not self.members:  # sums drift
            self.room = self.left = self.work = self.peak = 0.0
        if one.group:
            self.groups[one.group] -= 1
            if not self.groups[one.group]:
                del self.groups[one.group]

    def change(self, one: Trajectory, mean_final: float) -> None:
        self._replace(one, share_of(one, mean_final))

    def _replace(self, one: Trajectory, share: Share) -> None:
        old, one.share = one.share, share
        if share == old:
            return
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
        """Members whose KV the engine evicts, least recently used first; never the last member."""
        too_many, found = self.context_tokens - self.open_tokens, list[Trajectory]()
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
        """Context tokens that may be open; with exchanged KV, more while tools run."""
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
        """Seconds to generate ``tokens`` beside the members that fit; at most ``most_s``."""
        if not self.declared:
            return most_s
        fits = min(1.0, self.spec.kv_tokens / max(1, self.context_tokens))
        others = max(0, round(fits * self.running) - 1)
        return min(most_s, tokens * self.s_per_token(fits * self.context_tokens, others))

    def s_per_token(self, held_tokens: float, others: int) -> float:
        """Seconds per token beside ``others`` generations with ``held_tokens`` of context."""
        spec = self.spec
        beside = min(others, max(0, spec.rollout_slots - 1))
        return spec.alone_s_per_token + spec.beside_s_per_token * beside + self.context_s_per_token * held_tokens

    def end_s(self, longest: float, left: float, work: float) -> float:
        """Seconds until the engine ends: ``left`` tokens in all, ``longest`` in one trajectory."""
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
    """One trajectory's KV: ``context`` tokens now, and ``final`` tokens after ``left`` steps."""

    left: float
    context: float
    final: float

    @classmethod
    def of(cls, context: float, left: float, growth: float, limit: int) -> Demand:
        """Demand of a trajectory with ``left`` tokens to generate; 0 if unknown (``limit`` too)."""
        if left <= 0.0:
            return cls(FOREVER, context, context)
        final = context + growth * left
        return cls(left, context, max(context, min(final, limit)) if limit else final)


class Refused(NamedTuple):
    """A demand that did not fit into ``capacity``, at this growth and context limit."""

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
    """Peak KV tokens of all demands together until the last of them ends. O(n log n)."""
    peak = contexts = rates = 0.0
    for left, context, final in sorted(demands, reverse=True):
        rate = (final - context) / left if left > 0.0 else 0.0
        contexts += context if left > 0.0 else final
        rates += rate
        peak = max(peak, contexts + rates * left)
    return peak


@dataclass(slots=True)
class Mean:
    """A running mean; 0 without values."""

    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / self.count


class EngineTable:
    """Engines by name, and the record of every trajectory that has not ended.

    ``silent`` workers have not declared their engine; ``exchanging`` workers exchange KV.
    """

    def __init__(self, exponent: float = NOISY_NORM) -> None:
        self.exponent = exponent
        self.engines: dict[str, EngineState] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.buckets: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.exchanging: list[EngineState] = []
        self.max_context_tokens = 0
        self.slot_tokens = 0.0  # least KV of one slot
        self.finals, self.prompts, self.first_left = Mean(), Mean(), Mean()
        self.sampled = self.grown = 0.0  # tokens generated, and growth of contexts with them

    def of(self, key: str) -> Trajectory:
        one = self.trajectories.get(key)
        if one is None:
            one = self.trajectories[key] = Trajectory(key)
        return one

    def handle(self, event: Fact) -> None:
        # Type comparisons instead of match: every event comes here.
        if type(event) is TrajectoryParked:
            self._parked(self.of(event.key), event)
        elif type(event) is QuantumFinished:
            if (one := self.trajectories.get(event.key)) is not None:
                self._finished(one, event)
        elif isinstance(event, QuantumStarted):
            if event.phase is Phase.ROLLOUT:
                self._started(self.of(event.key), event.worker)
        elif type(event) is TrajectoryEnded:
            self._ended(event.key)
        elif type(event) is HomeForgotten:
            if event.key in self.trajectories:
                self.settle(self.trajectories[event.key], None)
        elif type(event) is WorkerCapacity:
            if event.rollout_slots > 0:
                self._joined(event)
        elif type(event) is WorkerWithdrawn:
            self._left(event.worker)

    def _parked(self, one: Trajectory, event: TrajectoryParked) -> None:
        if one.home is None and event.group:
            one.group = event.group
        self._stopped(one)
        if not event.context_tokens:
            return
        grown = event.context_tokens - one.context_tokens
        if not one.has_prompt:
            one.has_prompt = True
            self.prompts.add(max(0, grown))
        if grown and one.home is not None:
            one.home.refused = None
        self._grew(one, grown)

    def _finished(self, one: Trajectory, event: QuantumFinished) -> None:
        home = one.home
        if home is not None:
            home.took(event)
        self._stopped(one)
        self._grew(one, event.tokens + event.payload_tokens)
        self.sampled += event.tokens
        self.grown += event.tokens + event.payload_tokens
        if home is not None:
            home.refused = None
            if event.tokens:
                home.members[one.key] = home.members.pop(one.key)  # the most recently used
        if one.final_tokens is not None and event.tokens:
            self._believe(one, max(0.0, one.left_tokens - event.tokens), one.final_tokens)

    def _started(self, one: Trajectory, worker: str) -> None:
        self._stopped(one)
        self.settle(one, worker)
        if one.home is not None:
            one.generates_at = one.home
            one.home.running += 1

    def _stopped(self, one: Trajectory) -> None:
        if one.generates_at is not None:
            one.generates_at.running -= 1
            one.generates_at = None

    def _grew(self, one: Trajectory, tokens: int) -> None:
        one.context_tokens += tokens
        if one.home is not None:
            one.home.context_tokens += tokens

    def _ended(self, key: str) -> None:
        one = self.trajectories.pop(key, None)
        if one is None:
            return
        self._stopped(one)
        self.settle(one, None)
        if one.context_tokens:
            self.finals.add(one.context_tokens)

    def settle(self, one: Trajectory, worker: str | None) -> None:
        home, now = one.home, None if worker is None else self.engines.get(worker)
        if home is now:
            if now is not None:
                now.change(one, self.finals.mean)
            return
        if home is not None:
            home.remove(one)
        if now is not None:
            now.add(one, self.finals.mean)

    def forecast(self, one: Trajectory, left_tokens: float, final_tokens: float) -> None:
        """Set the tokens that a trajectory will generate and its last context, both capped."""
        is_first = one.final_tokens is None
        self._believe(one, left_tokens, final_tokens)
        if is_first:
            self.first_left.add(one.left_tokens)

    def _believe(self, one: Trajectory, left_tokens: float, final_tokens: float) -> None:
        limit = self.max_context_tokens
        if limit:
            final_tokens = min(final_tokens, limit)
            left_tokens = min(left_tokens, max(0.0, limit - one.context_tokens))
        one.left_tokens, one.final_tokens = left_tokens, final_tokens
        if one.home is not None:
            one.home.change(one, self.finals.mean)

    def context(self, one: Trajectory) -> float:
        return one.context_tokens or self.prompts.mean

    def room(self, one: Trajectory) -> float:
        return share_of(one, self.finals.mean).room

    def demand(self, one: Trajectory, growth: float) -> Demand:
        return Demand.of(self.context(one), one.left_tokens, growth, self.max_context_tokens)

    def of_degree(self, tp: int) -> list[str]:
        """Workers whose engines have this degree, or else the next higher one; may be empty."""
        degrees = {bucket: degree_of(bucket) for bucket in self.buckets}
        least = min((degree for degree in degrees.values() if degree >= tp), default=None)
        return [worker for bucket, degree in degrees.items() if degree == least for worker in self.buckets[bucket]]

    def _joined(self, spec: WorkerCapacity) -> None:
        engine = self.engines.get(spec.worker)
        if engine is None:
            engine = self.engines[spec.worker] = EngineState(spec, self.exponent)
        else:
            self._out_of_bucket(engine.spec)
        engine.declare(spec)
        self.buckets.setdefault(spec.bucket, []).append(spec.worker)
        (self.silent.discard if spec.declared else self.silent.add)(spec.worker)
        specs = [engine.spec for engine in self.engines.values()]
        self.max_context_tokens = max(spec.max_context_tokens for spec in specs)
        self.slot_tokens = min((s.kv_tokens / s.rollout_slots for s in specs if s.kv_tokens), default=0.0)
        self._list_exchanging()

    def _list_exchanging(self) -> None:
        engines = self.engines.values()
        self.exchanging = [each for each in engines if each.spec.kv_token_bytes and each.spec.kv_tokens]

    def _out_of_bucket(self, spec: WorkerCapacity) -> None:
        self.buckets[spec.bucket].remove(spec.worker)
        if not self.buckets[spec.bucket]:
            del self.buckets[spec.bucket]

    def _left(self, worker: str) -> None:
        engine = self.engines.pop(worker, None)
        if engine is None:
            return
        self.silent.discard(worker)
        self._list_exchanging()
        self._out_of_bucket(engine.spec)
        for one in list(engine.members.values()):
            if one.generates_at is engine:
                one.generates_at = None
            engine.remove(one)
