"""Capacity that engines declare, and the price of moving KV from one engine to another.

A move prefills the context again or sends its KV, whichever is quicker. The target declares its
prefill seconds. Sending takes a latency plus bytes over a bandwidth, fitted to measured transfers;
a prior stands in while few are measured.

Invariants
----------
1. Live runs and simulations take prices from `priced`, and a replay computes the logged prices.
2. Latency and seconds per byte are never negative.
3. KV is sent only between engines that exchange KV, and only if sending should be quicker, the
   target has not declared its speed, or the last `MEASURED_EVERY` moves all prefilled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from libra.facts import WorkerCapacity
from libra.types import EngineCapacity, StepSeconds

_DEGREE = re.compile(r"(?:^|-)tp(\d+)(?:-|$)")


def degree_of(bucket: str) -> int:
    """Tensor-parallel degree in a bucket's name (``tp4``, ``tp2-threads1``); 1 without one."""
    found = _DEGREE.search(bucket)
    return int(found[1]) if found else 1


class Move(msgspec.Struct, frozen=True, gc=False):
    """Price of moving a trajectory with ``tokens`` of context to another engine; 0 s if unknown."""

    home: str  # the worker whose engine has the KV
    tokens: int
    prefill_s: float  # computing it again
    transfer_s: float | None  # sending it; None if the engines do not exchange KV
    sends: bool  # the KV is sent

    @property
    def seconds(self) -> float:
        return self.transfer_s if self.sends and self.transfer_s is not None else self.prefill_s


PRIOR_LATENCY_S = 0.005
PRIOR_BYTES_PER_S = 1e9  # about one stream over 10 Gbit/s Ethernet, between two memories
MEASURED_EVERY = 16  # after so many moves that computed, one sends
PRIOR_WEIGHT = 0.1  # weight of the prior, relative to one transfer
FORGETTING = 0.9  # weight of a transfer relative to the one after it
_MIB = 2.0**20
_LARGE_BYTES = 64 * _MIB


class TransferPace:
    """Latency and seconds per byte of transfers, by least squares of relative errors."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = np.zeros((2, 3))  # normal equations of (1, MiB) / seconds = 1
        self._fitted: tuple[float, float] | None = None
        self._log_ratio = self._weight = 0.0  # to the prior, of all measured ones
        self._computed = 0  # moves since the last that sent

    def add(self, num_bytes: float, seconds: float) -> None:
        if seconds > 0.0:
            self.count += 1
            self._sums, self._fitted = FORGETTING * self._sums + _row(num_bytes, seconds), None
            self._log_ratio = FORGETTING * self._log_ratio + math.log(seconds / _prior_s(num_bytes))
            self._weight = FORGETTING * self._weight + 1.0

    def chosen(self, move: Move) -> Move:
        """The move, but every `MEASURED_EVERY`-th that would prefill sends, as a measurement."""
        self._computed = 0 if move.sends else self._computed + 1
        if self._computed < MEASURED_EVERY or move.transfer_s is None:
            return move
        self._computed = 0
        return msgspec.structs.replace(move, sends=True)

    def fitted(self) -> tuple[float, float]:
        """Latency in seconds, and seconds per byte."""
        if self._fitted is None:
            ratio = math.exp(self._log_ratio / self._weight) if self._weight else 1.0
            prior = [_row(size, ratio * _prior_s(size)) for size in (0.0, _LARGE_BYTES)]  # at the measured ratio
            (a, b, u), (_, c, v) = (self._sums + PRIOR_WEIGHT * sum(prior)).tolist()
            latency_s, mib_s = (u * c - v * b) / (a * c - b * b), (a * v - b * u) / (a * c - b * b)
            if latency_s < 0.0 or mib_s < 0.0:
                latency_s, mib_s = (0.0, v / c) if latency_s < 0.0 else (u / a, 0.0)
            self._fitted = latency_s, mib_s / _MIB
        return self._fitted

    def seconds(self, num_bytes: float) -> float:
        latency_s, byte_s = self.fitted()
        return latency_s + byte_s * num_bytes


def _prior_s(num_bytes: float) -> float:
    return PRIOR_LATENCY_S + num_bytes / PRIOR_BYTES_PER_S


def _row(num_bytes: float, seconds: float) -> NDArray[np.float64]:
    row = np.array([1.0, num_bytes / _MIB, seconds]) / seconds
    return np.outer(row[:2], row)


def priced(tokens: int, home: WorkerCapacity, target: WorkerCapacity, pace: TransferPace) -> Move:
    num_bytes = tokens * home.kv_token_bytes if target.kv_token_bytes else 0
    prefill_s = tokens * target.prefill_s_per_token
    transfer_s = pace.seconds(num_bytes) if num_bytes else None
    sends = transfer_s is not None and (transfer_s < prefill_s or not target.declared)
    return Move(home.worker, tokens, prefill_s, transfer_s, sends)


ERRORS_TAKEN = 2.0  # engines of a bucket differ by more than this many sums of errors
DIGITS = 12  # decimals of seconds in events: a log has exactly the numbers behind the decisions


def joined_of(
    worker: str, bucket: str, capacity: EngineCapacity, *, rollout_slots: int | None = None, tool_slots: int = 0
) -> WorkerCapacity:
    """A worker's capacity, as its engine declares it; ``rollout_slots`` overrides the slots."""
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
    """Engine with the median seconds of its bucket, unless its own differ by more than errors."""
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
    """Largest relative change of an engine's pass seconds; infinite if its size changed."""
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
