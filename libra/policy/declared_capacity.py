"""The policy's event about a worker, from its engine's declaration: one translation, live and simulated.

Invariants
1. Seconds come from the engine's measured passes only; before there are any, all of them are 0: not known.
2. ``alone_s_per_token`` and ``full_s_per_token`` are passes that the declared form gives: of one sequence without context, and
   of all slots with the KV memory full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from libra.facts import WorkerCapacity
from libra.types import EngineCapacity, StepSeconds

ERRORS_TAKEN = 2.0
"""Engines of a bucket differ if their seconds do by more than so many times the sum of their errors."""
DIGITS = 12
"""Decimals of seconds in events, so that a log has exactly the numbers behind the decisions."""


def joined_of(
    worker: str, bucket: str, capacity: EngineCapacity, *, rollout_slots: int | None = None, tool_slots: int = 0
) -> WorkerCapacity:
    """A worker whose engine declares ``capacity``; ``rollout_slots`` are those it has now (None: the engine's)."""
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
    """An engine's capacity with the seconds of the median of its bucket, unless its own differ by more than their errors.

    Equal engines measure unlike passes, and so fit unlike seconds; without this a trajectory moves to whichever seems quick.
    ``alike`` are the seconds of all engines of its bucket that have measured some, its own included. An engine that has measured
    none takes the median, and None where nobody has.
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
    """Relative change of an engine: infinite if memory, slots or degree differ, or seconds are known that were not; else the
    largest change of a pass alone, a full one, and one that prefills a context.
    """
    held = [(each.kv_tokens, each.slots, each.tp, each.max_context_tokens) for each in (now, before)]
    if held[0] != held[1]:
        return float("inf")
    if now.steps is None or before.steps is None:
        return 0.0 if now.steps is before.steps else float("inf")
    context = now.kv_tokens / max(1, now.slots)

    def corners(steps: StepSeconds) -> tuple[float, ...]:
        return (
            steps.step_s(1, 0),
            steps.step_s(now.slots, now.kv_tokens / 2),
            steps.step_s(now.slots, now.kv_tokens),
            steps.step_s(1, 0, context),
        )

    pairs = zip(corners(now.steps), corners(before.steps), strict=True)
    return max(abs(a - b) / b if b > 0.0 else (0.0 if a == b else float("inf")) for a, b in pairs)
