"""Totals of trajectories, and what they cost an engine.

Seconds of trajectories on an engine: the share of the engine that each takes, and the least time each can take.

1. ``engine_s`` adds up: an engine kept at its concurrency is busy for the sum of its trajectories' ``engine_s``.
2. ``alone_s`` is a lower bound: no engine of this tensor-parallel degree finishes a trajectory sooner than alone on it, its
   tools included. No assignment of trajectories to engines is faster than the longest trajectory.
3. Trajectories in flight never hold more KV than fits; the others queue, and cost nothing while they wait.

Differs from the published planner of Libra (arXiv:2606.03077 v2), which divides tokens by a steady batch and has no longest-
trajectory bound.
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
"""Columns that `totals_of_trace` needs of a file of agents' turns; it uses ``tool_s`` if the file has it."""


@dataclass(frozen=True, slots=True)
class TrajectoryTotals:
    """Totals of n trajectories, one entry each, (n,)."""

    prompt_tokens: Array  # context before the first turn
    generated_tokens: Array  # sampled over all turns
    observation_tokens: Array  # added by tools over all turns
    num_turns: Array  # generations, at least 1
    tool_wait_s: Array  # of all tool calls together

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
        """(n,) tokens in the context when the trajectory ends."""
        return self.prompt_tokens + self.generated_tokens + self.observation_tokens

    @property
    def mean_context_tokens(self) -> Array:
        """(n,) context of a generated token on average; the context grows evenly from prompt to end."""
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
        """Totals from arrays and scalars, which broadcast."""
        given = (prompt_tokens, generated_tokens, observation_tokens, num_turns, tool_wait_s)
        columns = [np.asarray(values, float) for values in given]
        size = np.broadcast_shapes((1,), *(column.shape for column in columns))
        return cls(*(np.broadcast_to(column, size).copy() for column in columns))

    def resampled(self, num_trajectories: int, seed: int, max_context_tokens: int | None = None) -> TrajectoryTotals:
        """``num_trajectories`` of these, sampled with replacement; each ends when its context reaches
        ``max_context_tokens``."""
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
    """Totals of recorded agents, in their order; ``tool_s`` are the seconds of a tool call if the trace has none.

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
"""Maximum number of sequences that an engine decodes at once, even if its KV holds more: the default of inference
engines."""
HEADROOM_FRAC = 0.1
"""Share of the KV left free: contexts in flight are longer at times than on average."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Costs of trajectories on engines of one tensor-parallel degree, each array (n,)."""

    engine_s: Array  # seconds of an engine that each takes at ``concurrency``
    alone_s: Array  # seconds from its start to its end on an engine of its own, tools included
    concurrency: float  # sequences that an engine decodes at once
    max_concurrency: float  # the most that its KV holds
    fits: NDArray[np.bool_]  # whether the trajectory, at its longest, fits into an engine's KV


def rollout_cost(
    totals: TrajectoryTotals,
    engine: EngineSeconds,
    *,
    concurrency: float | None = None,
    max_sequences: int = MAX_SEQUENCES,
) -> RolloutCost:
    """The cost of each trajectory on an engine that keeps the KV of trajectories whose tools run.

    ``concurrency`` sequences decode at once: by default as many as KV and ``max_sequences`` (the engine's own limit) allow,
    at most all trajectories.
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
    """(n,) engine seconds to compute prompts and observations, each once."""
    later = np.maximum(totals.num_turns - 1, 0)
    each = np.divide(totals.observation_tokens, later, out=np.zeros_like(later), where=later > 0)
    observed_s = later * engine.prefills_s(np.ceil(each), totals.mean_context_tokens)
    return np.asarray(engine.prefills_s(totals.prompt_tokens, 0.0) + observed_s)


def _decoding(
    totals: TrajectoryTotals, engine: EngineSeconds, room: float, mean_context: float, prefill_s: Array
) -> float:
    """Sequences that decode while ``room`` trajectories hold KV, those whose tools run among them."""
    waits_s, tokens = float(totals.tool_wait_s.sum()), float(totals.generated_tokens.sum())
    busy = room
    for _ in range(20):  # a fixed point: the more decode at once, the longer a step, the smaller the share of waiting
        step_s = float(engine.decode_steps_s(max(busy, 1.0), max(busy, 1.0) * mean_context))
        works_s = tokens * step_s + float(prefill_s.sum())
        busy += 0.5 * (room * works_s / max(works_s + waits_s, 1e-12) - busy)
    return max(busy, min(room, 1.0))
