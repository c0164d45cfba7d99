"""Engines, the trajectories at home on each, and the sums that follow; from the events alone.

Invariants
----------
1. A trajectory has at most one home, a present engine: the one where it generated last.
2. An engine that has left holds nothing.
3. The sums of an engine are those of its members' shares; an empty engine has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

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
from libra.policy.kv_profile import Demand, Refused
from libra.policy.trajectory import NO_SHARE, Share, Trajectory
from libra.types import Phase

REMEMBERED = 0.95
"""Weight of an engine's past generations, relative to its newest, in the seconds that generations and tools take."""
MOST_OPEN = 8.0
"""Open contexts hold at most so many times the tokens that fit into memory, however long tools take."""
UNSURE, SURE = 3.0, 64.0
"""Exponents of the norm (`libra.policy.engine_loads`). The longest alone overrates a predictor whose forecasts correlate with the
truth by 0.6: 2 to 5 % of the makespan in `benchmarks.cmlfq_sim`. For exact lengths the longest is right."""
THOUSANDS = 1e-3
STANDS_OUT = 0.999
"""A member with more than this share of the sum: the rest is summed again, because the difference would lose digits."""
GROWTH_HELD_FREE = 0.7
"""KV memory is reserved for this share of the growth of contexts: those of one engine do not all end at once."""
LESS, MORE, LEAST_SHARE = 0.98, 0.002, 0.5
"""The share of an engine's memory that new trajectories may plan with: times the first whenever a context is pushed out, plus the
second whenever a trajectory ends or leaves, and never below the third. So forecasts that are too short reserve more memory."""
_DEGREE = re.compile(r"(?:^|-)tp(\d+)(?:-|$)")


def degree_of(bucket: str) -> int:
    """Tensor-parallel degree in the name of a bucket (``tp4``, ``tp2-threads1``); 1 if it has none."""
    found = _DEGREE.search(bucket)
    return int(found[1]) if found else 1


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
        one.share = share = _share(one, mean_final)
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
        old, share = one.share, _share(one, mean_final)
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


def _share(one: Trajectory, mean_final: float) -> Share:
    tokens, final = one.context_tokens, one.final_tokens
    held = GROWTH_HELD_FREE * max(0.0, (mean_final if final is None else final) - tokens)
    return Share(tokens + held, one.left_tokens, one.work())


class EngineTable:
    """Engines by name, and the record of every trajectory that has not ended.

    Parameters
    ----------
    exponent : float
        `UNSURE`, or `SURE` where forecasts of lengths are exact.

    Attributes
    ----------
    engines : dict of str to EngineState
        By worker.
    trajectories : dict of str to Trajectory
    buckets : dict of str to list of str
        Workers of each bucket.
    silent : set of str
        Workers whose engine has not declared itself.
    exchanging : list of EngineState
        Engines that exchange KV.
    max_context_tokens : int
        Of the engine that takes the longest contexts; 0: not known.
    slot_tokens : float
        KV of one slot, of the engine that has least; 0: not known.
    mean_final, mean_prompt, mean_told : float
        Mean context of ended trajectories, mean prompt, and mean first forecast.
    sampled, grown : float
        Tokens generated, and context that came with them.
    """

    def __init__(self, exponent: float = UNSURE) -> None:
        self.exponent = exponent
        self.engines: dict[str, EngineState] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.buckets: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.exchanging: list[EngineState] = []
        self.max_context_tokens = 0
        self.slot_tokens = 0.0
        self.mean_final = self.mean_prompt = self.mean_told = 0.0
        self._num_ended = self._num_prompts = self._num_told = 0
        self.sampled = self.grown = 0.0

    def of(self, key: str) -> Trajectory:
        """The record of a trajectory, from its first event on."""
        one = self.trajectories.get(key)
        if one is None:
            one = self.trajectories[key] = Trajectory(key)
        return one

    def handle(self, event: Fact) -> None:
        """Follow one event."""
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

    # ---------------------------------------------------------------- trajectories

    def _parked(self, one: Trajectory, event: TrajectoryParked) -> None:
        if one.home is None and event.group:
            one.group = event.group
        self._stopped(one)
        if not event.context_tokens:
            return
        grown = event.context_tokens - one.context_tokens
        if not one.has_prompt:
            one.has_prompt = True
            self._num_prompts += 1
            self.mean_prompt += (max(0, grown) - self.mean_prompt) / self._num_prompts
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
            self._num_ended += 1
            self.mean_final += (one.context_tokens - self.mean_final) / self._num_ended

    def settle(self, one: Trajectory, worker: str | None) -> None:
        """The trajectory is at home on ``worker``; None, or a worker without an engine: nowhere."""
        home, now = one.home, None if worker is None else self.engines.get(worker)
        if home is now:
            if now is not None:
                now.change(one, self.mean_final)
            return
        if home is not None:
            home.remove(one)
        if now is not None:
            now.add(one, self.mean_final)

    def forecast(self, one: Trajectory, left_tokens: float, final_tokens: float) -> None:
        """The trajectory is expected to generate ``left_tokens`` more and to end with a context of ``final_tokens``, each at most
        the longest context of any engine, so that a high first forecast leaves none empty."""
        is_first = one.final_tokens is None
        self._believe(one, left_tokens, final_tokens)
        if is_first:
            self._num_told += 1
            self.mean_told += (one.left_tokens - self.mean_told) / self._num_told

    def _believe(self, one: Trajectory, left_tokens: float, final_tokens: float) -> None:
        limit = self.max_context_tokens
        if limit:
            final_tokens = min(final_tokens, limit)
            left_tokens = min(left_tokens, max(0.0, limit - one.context_tokens))
        one.left_tokens, one.final_tokens = left_tokens, final_tokens
        if one.home is not None:
            one.home.change(one, self.mean_final)

    def context(self, one: Trajectory) -> float:
        """Tokens of context; before the first generation, the mean prompt's."""
        return one.context_tokens or self.mean_prompt

    def room(self, one: Trajectory) -> float:
        """KV tokens that are reserved for a trajectory."""
        return _share(one, self.mean_final).room

    def demand(self, one: Trajectory, growth: float) -> Demand:
        """KV of a trajectory over time, at ``growth`` tokens of context per token generated."""
        return Demand.of(self.context(one), one.left_tokens, growth, self.max_context_tokens)

    # ---------------------------------------------------------------- engines

    def of_degree(self, tp: int) -> list[str]:
        """Workers whose engines have this tensor-parallel degree, or the next higher one present; may be empty."""
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
        names = self.buckets[spec.bucket]
        names.remove(spec.worker)
        if not names:
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
