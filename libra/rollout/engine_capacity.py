"""What an engine says of itself: what it can hold, computed from its model's configuration, and how fast it turned out to be.

`PassMeter` fits `libra.types.StepSeconds` to an engine's own forward passes. It is exact where passes are what the form says: of
four coefficients, none below 0, each subset is solved and the best admissible one taken.

Invariants
1. No coefficient is negative, and none is guessed: before `FEWEST_PASSES` there are no seconds at all.
2. The error told is of passes that were not fitted: every second block of up to `BLOCK` passes is left out, and predicted.
3. Only the last `KEPT_PASSES` count: an engine that became slower says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import EngineError, ModelError
from libra.types import StepSeconds

Array = NDArray[np.float64]

KEPT_PASSES = 2048
"""Passes that are remembered: some seconds to minutes of an engine's life."""
FEWEST_PASSES = 32
"""Passes before anything is said."""
REFIT_FRAC = 0.125
"""A fit is made anew when so many more passes ran since the last, as a share of those it rests on."""
BLOCK = 8
"""Most passes in a row that are added up before they are fitted or predicted: what counts are sums of seconds, and the form is
linear. A machine that is shared makes single passes late, and by ratios of those every fit would come out too fast."""
OUTLIER = 3.0
"""A pass further off than so many times the median counts for less: first passes compile, and a machine is shared."""
ROUNDS = 6
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30


def kv_token_bytes(config: Mapping[str, Any], dtype: str, tp: int = 1) -> int:
    """Bytes of one token's keys and values, all layers and all ranks together, by a model's ``config.json``.

    Key-value heads that ``tp`` does not divide are copied: every rank has at least one.
    """
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype: got {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return 2 * int(config["num_hidden_layers"]) * math.ceil(heads / tp) * tp * head_dim * DTYPE_BYTES[dtype]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture's name as ``qwen3-28x1024-h16kv8-v151936``: engines that serve the same one can be compared."""
    heads = config["num_attention_heads"]
    return (
        f"{config.get('model_type', 'model')}-{config['num_hidden_layers']}x{config['hidden_size']}-h{heads}"
        f"kv{config.get('num_key_value_heads') or heads}-v{config['vocab_size']}"
    )


def tokens_within(kv_cache_gib: float, token_bytes: int, max_context_tokens: int) -> int:
    """Tokens of KV that fit into a budget; EngineError where not even one trajectory does."""
    tokens = int(kv_cache_gib * GIB) // token_bytes
    if tokens < max_context_tokens:
        raise EngineError(
            f"engine: rollout.kv_cache_gib={kv_cache_gib:g} holds {tokens} tokens of KV ({token_bytes} bytes each), and one "
            f"trajectory may have rollout.max_context_tokens={max_context_tokens}; type "
            f"rollout.kv_cache_gib={math.ceil(1e6 * max_context_tokens * token_bytes / GIB) / 1e6:g} or more"
        )
    return tokens


class PassMeter:
    """Seconds of an engine's last forward passes, and the `StepSeconds` that they show. One thread adds, any may ask."""

    def __init__(self) -> None:
        self.count = 0
        self._rows = np.zeros((KEPT_PASSES, 5))  # 1, sequences, context tokens, prefilled tokens, seconds
        self._rows[:, 0] = 1.0
        self._fitted: tuple[int, StepSeconds | None] = (0, None)

    def add(self, sequences: int, context_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """A pass ended: so many sequences got a token, attending to ``context_tokens`` in all; so many tokens were prefilled."""
        if seconds > 0.0:
            self._rows[self.count % KEPT_PASSES, 1:] = sequences, context_tokens, prefill_tokens, seconds
            self.count += 1

    def seconds(self) -> StepSeconds | None:
        """What the passes show; None before there are enough. Fitted anew when there are an eighth more than the last time."""
        count, (fitted_at, found) = self.count, self._fitted
        if count < FEWEST_PASSES:
            return None
        if found is None or count - fitted_at >= REFIT_FRAC * min(fitted_at, KEPT_PASSES):
            kept = min(count, KEPT_PASSES)
            order = (np.arange(count - kept, count)) % KEPT_PASSES
            found = fit_steps(self._rows[order].copy())
            self._fitted = (count, found)
        return found


def fit_steps(rows: Array) -> StepSeconds:
    """`StepSeconds` of passes given as (n, 5): 1, sequences, context tokens, prefilled tokens, seconds (above 0); n above 1."""
    size = max(1, min(BLOCK, len(rows) // FEWEST_PASSES))
    blocks = np.add.reduceat(rows, np.arange(0, len(rows), size), axis=0)
    asked = blocks[1::2]
    error = float(np.abs(asked[:, :4] @ _fitted(blocks[::2]) / asked[:, 4] - 1.0).mean())
    fixed_s, sequence_s, context_token_s, prefill_token_s = (float(value) for value in _fitted(blocks))
    return StepSeconds(fixed_s, sequence_s, context_token_s, prefill_token_s, len(rows), error)


def _fitted(rows: Array) -> Array:
    """Four coefficients, none negative, by relative least squares; passes that are far off count for less."""
    relative = rows[:, :4] / rows[:, 4:]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    relative = relative / scale
    weights, values = np.ones(len(rows)), np.zeros(4)
    for _ in range(ROUNDS):
        values = _none_negative(relative * weights[:, None], weights)
        off = np.abs(relative @ values - 1.0)
        weights = np.sqrt(np.minimum(1.0, OUTLIER * max(1e-3, float(np.median(off))) / np.maximum(off, 1e-12)))
    return np.asarray(values / scale)


def _none_negative(a: Array, b: Array) -> Array:
    """The values, none negative, with the least squared error of ``a @ values - b``: the best of all subsets of columns."""
    gram, right = a.T @ a, a.T @ b
    best, least = np.zeros(a.shape[1]), math.inf
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), size):
            part = list(chosen)
            found = np.linalg.lstsq(gram[np.ix_(part, part)], right[part], rcond=1e-10)[0]
            if (found < 0.0).any():
                continue
            error = float(found @ gram[np.ix_(part, part)] @ found - 2.0 * found @ right[part])
            if error < least - 1e-12 * abs(least if math.isfinite(least) else 0.0):
                best, least = np.zeros(a.shape[1]), error
                best[part] = found
    return best
