"""Trajectory totals, and the engine time that trajectories take.

1. ``engine_s`` adds up: an engine at full concurrency is busy for the sum over its trajectories.
2. ``alone_s`` is a lower bound: no engine of this TP degree finishes a trajectory (tools included)
   sooner, so that no assignment is faster than the longest trajectory.
3. Trajectories in flight never hold more KV than fits; queued trajectories cost nothing.

Deviates from Libra's planner (arXiv:2606.03077 v2), which divides tokens by a steady batch and has
no longest-trajectory bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError, PlanError
from libra.hardware import EngineSeconds
from libra.planner.agent_turns import Recorded

Array = NDArray[np.float64]

TRACE_COLUMNS = ("task", "sample", "turn", "prompt_tokens", "completion_tokens")
"""Columns that `totals_of_trace` requires; ``tool_s`` is optional."""


@dataclass(frozen=True, slots=True)
class TrajectoryTotals:
    """Totals of n trajectories, each array (n,)."""

    prompt_tokens: Array  # context before the first turn
    generated_tokens: Array  # sampled over all turns
    observation_tokens: Array  # added by tools over all turns
    num_turns: Array  # generations, at least 1
    tool_wait_s: Array  # total over all tool calls

    def __post_init__(self) -> None:
        shape = self.prompt_tokens.shape
        for name in (field.name for field in fields(self)):
            values, least = getattr(self, name), 1 if name == "num_turns" else 0
            if values.shape != shape or values.ndim != 1 or not len(values):
                raise ConfigError(f"workload.{name}: got shape {values.shape}; give one number per trajectory, {shape}")
            if not (np.all(np.isfinite(values)) and values.min() >= least):
                raise ConfigError(f"workload.{name}: got {values.min()}; give finite numbers of at least {least}")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def final_context_tokens(self) -> Array:
        """(n,) context tokens at the end of each trajectory."""
        return self.prompt_tokens + self.generated_tokens + self.observation_tokens

    @property
    def mean_context_tokens(self) -> Array:
        """(n,) mean context of a generated token, if context grows evenly from prompt to end."""
        return (self.prompt_tokens + self.final_context_tokens) / 2.0

    @classmethod
    def of(
        cls,
        prompt_tokens: ArrayLike,
        generated_tokens: ArrayLike,
        *,
        observation_tokens: ArrayLike = 0.0,
        num_turns: ArrayLike = 1,
        tool_wait_s: ArrayLike = 0.0,
    ) -> TrajectoryTotals:
        """Totals from arrays and scalars, broadcast to one shape."""
        given = (prompt_tokens, generated_tokens, observation_tokens, num_turns, tool_wait_s)
        columns = [np.asarray(values, float) for values in given]
        size = np.broadcast_shapes((1,), *(column.shape for column in columns))
        return cls(*(np.broadcast_to(column, size).copy() for column in columns))

    def resampled(self, num_trajectories: int, seed: int, max_context_tokens: int | None = None) -> TrajectoryTotals:
        """A sample with replacement, each trajectory cut at ``max_context_tokens`` of context."""
        pick = np.random.default_rng(seed).integers(0, len(self), num_trajectories)
        prompt, generated, observed = (
            column[pick] for column in (self.prompt_tokens, self.generated_tokens, self.observation_tokens)
        )
        share = np.ones(num_trajectories)
        if max_context_tokens is not None:
            prompt = np.minimum(prompt, max_context_tokens - 1)
            share = np.minimum(1.0, (max_context_tokens - prompt) / np.maximum(generated + observed, 1.0))
        turns = np.maximum(1.0, np.round(self.num_turns[pick] * share))
        return TrajectoryTotals(prompt, generated * share, observed * share, turns, self.tool_wait_s[pick] * share)


def totals_of_trace(recorded: Sequence[Recorded], tool_s: float) -> TrajectoryTotals:
    """Totals of recorded trajectories, in order; ``tool_s`` is the default tool time per call.

    PlanError if the trace is empty, or a turn has no ``prompt_tokens``.
    """
    if not recorded:
        raise PlanError("planner.trace: the file has no row; a trace has one row per turn")
    rows = []
    for one in recorded:
        contexts = [turn.prompt_tokens for turn in one.turns]
        if None in contexts:
            raise PlanError(
                f"planner.trace: task {one.task!r}, sample {one.sample!r}: turn {contexts.index(None)} has no prompt_tokens; "
                "the planner needs the context before each turn"
            )
        first, last = contexts[0] or 0, contexts[-1] or 0
        generated = [turn.completion_tokens for turn in one.turns]
        waits = [tool_s if turn.tool_s is None else turn.tool_s for turn in one.turns]
        observed = max(last - first - sum(generated[:-1]), 0.0)
        rows.append((first, sum(generated), observed, len(one.turns), sum(waits)))
    return TrajectoryTotals(*np.array(rows, dtype=np.float64).T.copy())


MAX_SEQUENCES = 256
"""Default limit of inference engines on concurrently decoded sequences."""
HEADROOM_FRAC = 0.1
"""Share of KV left free, because contexts in flight are sometimes longer than average."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Costs of trajectories on engines of one tensor-parallel degree, each array (n,)."""

    engine_s: Array  # engine seconds of each trajectory at ``concurrency``
    alone_s: Array  # seconds from start to end alone on an engine, tools included
    concurrency: float  # sequences that an engine decodes at once
    max_concurrency: float  # the most that its KV holds
    fits: NDArray[np.bool_]  # whether the trajectory's final context fits into an engine's KV


def rollout_cost(
    totals: TrajectoryTotals,
    engine: EngineSeconds,
    *,
    concurrency: float | None = None,
    max_sequences: int = MAX_SEQUENCES,
) -> RolloutCost:
    """Cost of each trajectory on an engine that keeps KV during tool calls.

    ``concurrency`` is the number of sequences that decode at once, by default the most that KV and
    ``max_sequences`` (the engine's limit) allow, at most all trajectories.
    """
    context, generated = totals.mean_context_tokens, totals.generated_tokens
    prefill_s = _prefill_s(totals, engine)
    mean_context = float((context * generated).sum() / max(generated.sum(), 1.0))
    room = (1.0 - HEADROOM_FRAC) * engine.kv_capacity_tokens / max(mean_context, 1.0)
    allowed = min(_decoding(totals, engine, room, mean_context, prefill_s), float(max_sequences))
    chosen = max(1.0, min(allowed, float(len(totals)))) if concurrency is None else float(concurrency)
    base_s = float(engine.decode_steps_s(chosen, 0.0))
    attention_s = (engine.decode_steps_s(chosen, chosen * context) - base_s) / chosen
    return RolloutCost(
        engine_s=prefill_s + generated * (base_s / chosen + attention_s),
        alone_s=prefill_s + generated * engine.decode_steps_s(1, context) + totals.tool_wait_s,
        concurrency=chosen,
        max_concurrency=allowed,
        fits=np.asarray(totals.final_context_tokens <= engine.kv_capacity_tokens),
    )


def _prefill_s(totals: TrajectoryTotals, engine: EngineSeconds) -> Array:
    """(n,) engine seconds that compute each prompt and observation token once."""
    later = np.maximum(totals.num_turns - 1, 0)
    each = np.divide(totals.observation_tokens, later, out=np.zeros_like(later), where=later > 0)
    observed_s = later * engine.prefills_s(np.ceil(each), totals.mean_context_tokens)
    return np.asarray(engine.prefills_s(totals.prompt_tokens, 0.0) + observed_s)


def _decoding(
    totals: TrajectoryTotals, engine: EngineSeconds, room: float, mean_context: float, prefill_s: Array
) -> float:
    """Sequences that decode while ``room`` trajectories, including those waiting for tools, hold KV."""
    waits_s, tokens = float(totals.tool_wait_s.sum()), float(totals.generated_tokens.sum())
    busy = room
    for _ in range(20):  # fixed point: more decoding lengthens a step and lowers the waiting share
        step_s = float(engine.decode_steps_s(max(busy, 1.0), max(busy, 1.0) * mean_context))
        works_s = tokens * step_s + float(prefill_s.sum())
        busy += 0.5 * (room * works_s / max(works_s + waits_s, 1e-12) - busy)
    return max(busy, min(room, 1.0))
