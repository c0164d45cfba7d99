"""Seconds of trajectories on an engine: the share of the engine that each takes, and the least time each can take.

1. ``engine_s`` adds up: an engine kept at its concurrency is busy for the sum of its trajectories' ``engine_s``.
2. ``alone_s`` is a lower bound: no engine of this tensor-parallel degree finishes a trajectory sooner than alone on it, its
   tools included. No assignment of trajectories to engines is faster than the longest trajectory.
3. Trajectories in flight never hold more KV than fits; the others queue, and cost nothing while they wait.

Differs from the published planner of Libra (arXiv:2606.03077 v2), which divides tokens by a steady batch and has no longest-
trajectory bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware import EngineSeconds
from libra.planner.cost.trajectory_totals import TrajectoryTotals

Array = NDArray[np.float64]

MAX_SEQUENCES = 256
"""Maximum number of sequences that an engine decodes at once, even if its KV holds more: the default of inference
engines."""
HEADROOM_FRAC = 0.1
"""Share of the KV left free: contexts in flight are longer at times than on average."""


class ManySeconds(EngineSeconds, Protocol):
    """`EngineSeconds` with its times for arrays."""

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps."""

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Costs of trajectories on engines of one tensor-parallel degree.

    Attributes
    ----------
    engine_s : (n,) array
        Seconds of an engine that each trajectory takes at ``concurrency``.
    alone_s : (n,) array
        Seconds from its start to its end on an engine of its own; tools included.
    concurrency : float
        Sequences an engine decodes at once.
    max_concurrency : float
        The largest ``concurrency`` that KV holds.
    fits : (n,) array of bool
        Whether the trajectory, at its longest, fits into an engine's KV; this degree cannot generate one that does not.
    """

    engine_s: Array
    alone_s: Array
    concurrency: float
    max_concurrency: float
    fits: NDArray[np.bool_]


def rollout_cost(
    totals: TrajectoryTotals,
    engine: ManySeconds,
    *,
    concurrency: float | None = None,
    max_sequences: int = MAX_SEQUENCES,
) -> RolloutCost:
    """The cost of each trajectory on an engine that keeps the KV of trajectories whose tools run.

    Parameters
    ----------
    totals : TrajectoryTotals
    engine : ManySeconds
        E.g. `libra.hardware.engine_seconds`.
    concurrency : float, optional
        Sequences decoding at once. None: as many as KV and ``max_sequences`` allow, at most all trajectories.
    max_sequences : int
        The engine's own limit.

    Raises
    ------
    ConfigError
        ``concurrency`` does not fit, or is not above 0.
    """
    context, generated = totals.mean_context_tokens, totals.generated_tokens
    prefill_s = _prefill_s(totals, engine)
    mean_context = float((context * generated).sum() / max(generated.sum(), 1.0))
    room = (1.0 - HEADROOM_FRAC) * engine.kv_capacity_tokens / max(mean_context, 1.0)
    allowed = min(_decoding(totals, engine, room, mean_context, prefill_s), float(max_sequences))
    chosen = max(1.0, min(allowed, float(len(totals)))) if concurrency is None else float(concurrency)
    if concurrency is not None and not 0 < concurrency <= max(allowed, 1.0):
        raise ConfigError(
            f"concurrency: got {concurrency} with tp={engine.tp}; allowed is above 0 and at most {allowed:.1f}: "
            f"KV of {engine.kv_capacity_tokens:,} tokens and {max_sequences} sequences hold no more at {mean_context:,.0f} tokens"
        )
    base_s = float(engine.decode_steps_s(chosen, 0.0))
    attention_s = (engine.decode_steps_s(chosen, chosen * context) - base_s) / chosen
    return RolloutCost(
        engine_s=prefill_s + generated * (base_s / chosen + attention_s),
        alone_s=prefill_s + generated * engine.decode_steps_s(1, context) + totals.tool_wait_s,
        concurrency=chosen,
        max_concurrency=allowed,
        fits=np.asarray(totals.final_context_tokens <= engine.kv_capacity_tokens),
    )


def _prefill_s(totals: TrajectoryTotals, engine: ManySeconds) -> Array:
    """(n,) engine seconds to compute prompts and observations, each once."""
    later = np.maximum(totals.num_turns - 1, 0)
    each = np.divide(totals.observation_tokens, later, out=np.zeros_like(later), where=later > 0)
    observed_s = later * engine.prefills_s(np.ceil(each), totals.mean_context_tokens)
    return np.asarray(engine.prefills_s(totals.prompt_tokens, 0.0) + observed_s)


def _decoding(
    totals: TrajectoryTotals, engine: ManySeconds, room: float, mean_context: float, prefill_s: Array
) -> float:
    """Sequences that decode while ``room`` trajectories hold KV, those whose tools run among them."""
    waits_s, tokens = float(totals.tool_wait_s.sum()), float(totals.generated_tokens.sum())
    busy = room
    for _ in range(20):  # a fixed point: the more decode at once, the longer a step, the smaller the share of waiting
        step_s = float(engine.decode_steps_s(max(busy, 1.0), max(busy, 1.0) * mean_context))
        works_s = tokens * step_s + float(prefill_s.sum())
        busy += 0.5 * (room * works_s / max(works_s + waits_s, 1e-12) - busy)
    return max(busy, min(room, 1.0))
