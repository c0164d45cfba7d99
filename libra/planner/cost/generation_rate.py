"""What a GPU delivers while so many responses of such a length are in flight: the comparison of tensor-parallel degrees.

1. Rates are per GPU. A degree is better where its engine delivers more tokens per GPU-second, not more per engine.
2. An engine runs what its KV holds; the rest queues. Contexts, not responses, fill it.
3. Every turn computes a context once (``tokens_per_pass`` is what is generated for each such pass): that work is the same
   on all degrees but for communication, so that it dilutes what decoding gains or loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.planner.cost.rollout_cost import ManySeconds

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Generation:
    """Rates of one engine, one entry per asked point.

    Attributes
    ----------
    tp : int
    tokens_per_gpu_s : array
        Generated tokens per GPU-second.
    running : array
        Responses that run at once; the others in flight queue for KV.
    kv_demand : array
        Tokens of all responses in flight over what the KV holds; above 1 some queue.
    """

    tp: int
    tokens_per_gpu_s: Array
    running: Array
    kv_demand: Array


def generation(
    engine: ManySeconds, num_in_flight: ArrayLike, context_tokens: ArrayLike, tokens_per_pass: float
) -> Generation:
    """Rates of an engine with ``num_in_flight`` responses whose contexts have ``context_tokens`` each.

    Parameters
    ----------
    engine : EngineSeconds with times for arrays
    num_in_flight, context_tokens : array
        Broadcast.
    tokens_per_pass : float
        Tokens generated for each time a context is computed: a turn's, where nothing keeps prefixes; many where they are kept.
    """
    if not tokens_per_pass > 0:
        raise ConfigError(f"tokens_per_pass: got {tokens_per_pass}; allowed is above 0")
    num, context = np.broadcast_arrays(np.asarray(num_in_flight, float), np.asarray(context_tokens, float))
    running = np.minimum(num, np.maximum(engine.kv_capacity_tokens / context, 1.0))
    rounds = num / running
    decode_s = tokens_per_pass * rounds * engine.decode_steps_s(running, running * context)
    prefill_s = num * engine.prefills_s(context, 0.0)
    return Generation(
        tp=engine.tp,
        tokens_per_gpu_s=np.asarray(num * tokens_per_pass / (engine.tp * (decode_s + prefill_s))),
        running=np.asarray(running),
        kv_demand=np.asarray(num * context / engine.kv_capacity_tokens),
    )
