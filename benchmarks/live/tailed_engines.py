"""Engines of live benchmarks whose rollouts have a tail: a turn's tokens depend on its trajectory
alone.

A trajectory has several turns, and lengths have a long tail; they are the same on all compared
sides. `PacedEngine` waits for as long as its tokens would take.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from libra.rollout.transformers_engine import TransformersEngine
from libra.types import EngineCapacity, StepSeconds, StopReason, TurnOutput, TurnRequest

TOKEN_S = 0.011
"""Emulated seconds of a token for any batch: decoding is bound by memory traffic."""
MEDIAN_TOKENS, SIGMA, TURN_SIGMA = 15.0, 0.7, 0.25
"""Lognormal tokens of a turn, SIGMA among trajectories and TURN_SIGMA among turns of one: P99 over
median of trajectories is 5.1, as in agents' traces, before turns are cut."""
MOST_TOKENS = 64
"""Limit of a turn."""


def num_tokens(trajectory: str, turn: int) -> int:
    """Tokens of a turn, at least 2: the trajectory's typical turn plus the turn's own deviation."""
    parts = [trajectory, f"{trajectory}/{turn}"]
    seeds = [int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest()) for part in parts]
    whole, own = (np.random.default_rng(seed).standard_normal() for seed in seeds)
    return min(MOST_TOKENS, max(2, round(MEDIAN_TOKENS * math.exp(SIGMA * whole + TURN_SIGMA * own))))


class PacedEngine(TransformersEngine):
    """The transformers engine with random tokens after emulated seconds in place of forward passes."""

    def __init__(self, model_dir: Path, *, slots: int, max_context_tokens: int, version: int) -> None:
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version, threads=1)

    async def generate(self, request: TurnRequest) -> TurnOutput:
        rng = np.random.default_rng(request.seed)
        count = min(request.max_new_tokens, num_tokens(request.trajectory_id, request.turn))
        await asyncio.sleep(count * TOKEN_S)
        tokens = rng.integers(32, 96, count).astype(np.int32)
        tokens[-1] = request.stop_ids[0] if request.stop_ids else tokens[-1]
        versions = np.full(count, self.version, np.int32)
        logp = np.full(count, -math.log(96), np.float32)
        return TurnOutput(tokens, logp, versions, versions.copy(), StopReason.STOP, busy_s=count * TOKEN_S)

    def capacity(self) -> EngineCapacity:
        return replace(super().capacity(), steps=StepSeconds(TOKEN_S, 0.0, 0.0, 0.0, num_steps=1, error_frac=0.0))
