"""Engines, the trajectories at home on each, and the sums that follow; from the events alone.

Invariants
----------
1. A trajectory has at most one home, a present engine: the one where it generated last.
2. An engine that has left holds nothing.
3. Seconds in `WorkerCapacity` come from the engine's measured passes: of one sequence without
   context (alone), of all slots with the KV memory full (full); 0 before there are any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec

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
from libra.policy.engine_state import NOISY_NORM, Demand, EngineState, Trajectory, share_of
from libra.types import EngineCapacity, Phase, StepSeconds

_DEGREE = re.compile(r"(?:^|-)tp(\d+)(?:-|$)")


def degree_of(bucket: str) -> int:
    """Tensor-parallel degree in the name of a bucket (``tp4``, ``tp2-threads1``), or 1."""
    found = _DEGREE.search(bucket)
    return int(found[1]) if found else 1


class EngineTable:
    """Engines by name, and the record of every trajectory that has not ended.

    ``exponent`` is `NOISY_NORM`, or `EXACT_NORM` where lengths are known. ``silent`` workers have
    not declared their engine; ``exchanging`` engines exchange KV. ``slot_tokens`` is the least KV
    of one slot, ``mean_final`` the mean context of ended trajectories, ``mean_told`` the mean first
    forecast. ``sampled`` tokens were generated, and contexts have ``grown`` with them.
    """

    def __init__(self, exponent: float = NOISY_NORM) -> None:
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
        """A trajectory will generate ``left_tokens`` more, to a context of ``final_tokens``.

        Both are capped by the longest context of any engine, so that a high first forecast leaves
        none empty.
        """
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
        return share_of(one, self.mean_final).room

    def demand(self, one: Trajectory, growth: float) -> Demand:
        return Demand.of(self.context(one), one.left_tokens, growth, self.max_context_tokens)

    def of_degree(self, tp: int) -> list[str]:
        """Workers with engines of this degree, or the next higher one; may be empty."""
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


ERRORS_TAKEN = 2.0
"""Engines of a bucket differ if their seconds differ by more than this many sums of errors."""
DIGITS = 12  # decimals of seconds in events: a log has exactly the numbers behind the decisions


def joined_of(
    worker: str, bucket: str, capacity: EngineCapacity, *, rollout_slots: int | None = None, tool_slots: int = 0
) -> WorkerCapacity:
    """A worker whose engine declares ``capacity``, with its own slots or ``rollout_slots``."""
    slots = capacity.slots if rollout_slots is None else rollout_slots
    limit = capacity.max_context_tokens
    kv_token_bytes = capacity.kv_token_bytes if capacity.exchanges_kv else 0
    joined = WorkerCapacity(
        worker, bucket, slots, tool_slots, capacity.kv_tokens, max_context_tokens=limit, kv_token_bytes=kv_token_bytes
    )
    steps = capacity.steps
    if steps is None:
        return joined
    return msgspec.structs.replace(
        joined,
        alone_s_per_token=round(steps.step_s(1, 0), DIGITS),
        full_s_per_token=round(steps.step_s(slots or capacity.slots, capacity.kv_tokens), DIGITS),
        prefill_s_per_token=round(steps.prefill_token_s, DIGITS),
        beside_s_per_token=round(steps.sequence_s, DIGITS),
    )


def as_its_bucket(own: EngineCapacity, alike: Sequence[StepSeconds]) -> EngineCapacity:
    """An engine with the median seconds of its bucket, unless its own differ beyond their errors.

    Equal engines fit unlike seconds; without this a trajectory moves to whichever seems quick.
    ``alike``: seconds of all measured engines of the bucket; an engine without its own takes the
    median.
    """
    if not alike:
        return own

    def full_s(steps: StepSeconds) -> float:
        return steps.step_s(own.slots, own.kv_tokens / 2)

    median = sorted(alike, key=full_s)[(len(alike) - 1) // 2]
    pooled = replace(own, steps=median)
    if own.steps is None:
        return pooled
    error_frac = ERRORS_TAKEN * (own.steps.error_frac + median.error_frac)
    return pooled if off_by_frac(own, pooled) <= error_frac else own


def off_by_frac(now: EngineCapacity, before: EngineCapacity) -> float:
    """Largest relative change of an engine's passes; infinite if its size differs."""
    held = [(each.kv_tokens, each.slots, each.tp, each.max_context_tokens) for each in (now, before)]
    if held[0] != held[1]:
        return float("inf")
    if now.steps is None or before.steps is None:
        return 0.0 if now.steps is before.steps else float("inf")
    context = now.kv_tokens / max(1, now.slots)

    def corners(steps: StepSeconds) -> tuple[float, ...]:
        full = [steps.step_s(now.slots, tokens) for tokens in (now.kv_tokens / 2, now.kv_tokens)]
        return steps.step_s(1, 0), *full, steps.step_s(1, 0, context)

    pairs = zip(corners(now.steps), corners(before.steps), strict=True)
    return max(abs(a - b) / b if b > 0.0 else (0.0 if a == b else float("inf")) for a, b in pairs)
