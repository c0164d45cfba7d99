"""What trajectories cost an engine, and how soon each could be done at best.

1. ``engine_s`` adds up: an engine that is kept at its concurrency is busy for the sum of its trajectories' ``engine_s``.
2. ``alone_s`` is a lower bound: no engine of this tensor-parallel degree finishes a trajectory sooner than alone on it, its
   tools included. No assignment of trajectories to engines is faster than the longest of them.
3. Trajectories in flight never hold more KV than fits; whoever finds no room queues, and costs nothing while it does.

Differs from the published planner of Libra (arXiv:2606.03077 v2), which divides tokens by a steady batch and has no longest-
trajectory bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware import EngineSeconds
from libra.planner.cost.workload import Workload

Array = NDArray[np.float64]

MAX_SEQUENCES = 256
"""Sequences an engine decodes at once at most, whatever its KV holds: the default of inference engines."""


class ManySeconds(EngineSeconds, Protocol):
    """`EngineSeconds` with its times for arrays."""

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps."""

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Costs of a workload on engines of one tensor-parallel degree.

    Attributes
    ----------
    tp : int
    engine_s : (n,) array
        Seconds of an engine that each trajectory takes at ``concurrency``.
    alone_s : (n,) array
        Seconds from its start to its end if it had an engine for itself; tools included.
    tool_wait_s : (n,) array
    concurrency : float
        Sequences an engine decodes at once.
    resident : float
        Trajectories an engine holds KV of, those that wait for tools included.
    max_concurrency : float
        What ``concurrency`` can be before KV runs out.
    decode_step_s : float
        A step at ``concurrency`` and the workload's mean context.
    fits : (n,) array of bool
        The trajectory, at its longest, fits into an engine's KV; one that does not cannot be done on this degree.
    """

    tp: int
    engine_s: Array
    alone_s: Array
    tool_wait_s: Array
    concurrency: float
    resident: float
    max_concurrency: float
    decode_step_s: float
    fits: NDArray[np.bool_]

    @property
    def tokens_frac(self) -> Array:
        """(n,) share of its own alone time that a trajectory keeps an engine busy."""
        return (self.alone_s - self.tool_wait_s) / self.alone_s


def _prefill_s(workload: Workload, engine: ManySeconds, keeps_prefix: bool) -> Array:
    """(n,) engine seconds to compute prompts and what tools add; without a kept prefix every turn computes all of it again."""
    prompt = engine.prefills_s(workload.prompt_tokens, 0.0)
    later = np.maximum(workload.num_turns - 1, 0)
    each = np.divide(workload.observation_tokens, later, out=np.zeros_like(later), where=later > 0)
    if keeps_prefix:
        return np.asarray(prompt + later * engine.prefills_s(np.ceil(each), workload.mean_context_tokens))
    return np.asarray(prompt + later * engine.prefills_s(np.ceil(workload.mean_context_tokens), 0.0))


def _alone_decode_s(workload: Workload, engine: ManySeconds) -> Array:
    return workload.generated_tokens * engine.decode_steps_s(1, workload.mean_context_tokens)


def rollout_cost(
    workload: Workload,
    engine: ManySeconds,
    *,
    concurrency: float | None = None,
    max_sequences: int = MAX_SEQUENCES,
    keeps_prefix: bool = True,
    headroom_frac: float = 0.1,
) -> RolloutCost:
    """The cost of each trajectory on an engine.

    Parameters
    ----------
    workload : Workload
    engine : EngineSeconds with times for arrays
        E.g. `libra.hardware.engine_seconds`.
    concurrency : float, optional
        Sequences decoding at once. None: as many as KV and ``max_sequences`` allow, at most the workload.
    max_sequences : int
        The engine's own limit.
    keeps_prefix : bool
        KV of a trajectory that waits for a tool stays where it is; otherwise each turn computes its context again.
    headroom_frac : float
        Share of the KV left free: contexts in flight are longer at times than on average.

    Raises
    ------
    ConfigError
        ``concurrency`` does not fit, or is not above 0.
    """
    context = workload.mean_context_tokens
    prefill = _prefill_s(workload, engine, keeps_prefix)
    decode_alone = _alone_decode_s(workload, engine)
    alone = prefill + decode_alone + workload.tool_wait_s
    weights = workload.generated_tokens / max(workload.generated_tokens.sum(), 1.0)
    mean_context = float((context * weights).sum())
    room = (1.0 - headroom_frac) * engine.kv_capacity_tokens / max(mean_context, 1.0)
    resident = room
    decoding = _decoding(workload, engine, room, mean_context, prefill, keeps_prefix)
    allowed = min(decoding, float(max_sequences))
    if concurrency is None:
        chosen = max(1.0, min(allowed, float(len(workload))))
    else:
        if not 0 < concurrency <= max(allowed, 1.0):
            raise ConfigError(
                f"concurrency: got {concurrency} with tp={engine.tp}; allowed is above 0 and at most {allowed:.1f}, what "
                f"KV of {engine.kv_capacity_tokens:,} tokens and {max_sequences} sequences hold at {mean_context:,.0f} tokens"
            )
        chosen = float(concurrency)
    base = float(engine.decode_steps_s(chosen, 0.0))
    step = float(engine.decode_steps_s(chosen, chosen * mean_context))
    attention = (engine.decode_steps_s(chosen, chosen * context) - base) / chosen
    engine_s = prefill + workload.generated_tokens * (base / chosen + attention)
    return RolloutCost(
        tp=engine.tp,
        engine_s=engine_s,
        alone_s=alone,
        tool_wait_s=workload.tool_wait_s,
        concurrency=chosen,
        resident=min(resident, float(len(workload))),
        max_concurrency=allowed,
        decode_step_s=step,
        fits=np.asarray(workload.final_context_tokens <= engine.kv_capacity_tokens),
    )


def _decoding(
    workload: Workload, engine: ManySeconds, room: float, mean_context: float, prefill_s: Array, keeps_prefix: bool
) -> float:
    """Sequences that decode while ``room`` trajectories hold KV: those that wait for tools hold it too, if prefixes are kept."""
    if not keeps_prefix:
        return room
    waits = float(workload.tool_wait_s.sum())
    tokens = float(workload.generated_tokens.sum())
    busy = room
    for _ in range(20):  # a fixed point: the more decode at once, the longer a step, the smaller the share of waiting
        step = float(engine.decode_steps_s(max(busy, 1.0), max(busy, 1.0) * mean_context))
        works = tokens * step + float(prefill_s.sum())
        busy += 0.5 * (room * works / max(works + waits, 1e-12) - busy)
    return max(busy, min(room, 1.0))


def rollout_costs(workload: Workload, engines: Mapping[int, ManySeconds], **settings: float) -> dict[int, RolloutCost]:
    """`rollout_cost` on engines of several tensor-parallel degrees: ``engines[tp]``."""
    return {tp: rollout_cost(workload, engine, **settings) for tp, engine in engines.items()}  # type: ignore[arg-type]
