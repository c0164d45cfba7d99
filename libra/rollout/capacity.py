"""The declared capacity of an engine: its KV memory, and `libra.types.StepSeconds` of its passes.

1. No coefficient is negative, and none is guessed: before `FEWEST_PASSES` there are no seconds.
2. The reported error is of passes that were not fitted: every second block of up to `BLOCK` passes.
3. Only the last `KEPT_PASSES` count, so an engine that became slower reports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import EngineError, ModelError
from libra.seals import parsed_json
from libra.types import StepSeconds

Array = NDArray[np.float64]

KEPT_PASSES = 2048
"""Number of last passes that count: seconds to minutes."""
FEWEST_PASSES = 32
"""Passes before there is an estimate."""
REFIT_FRAC = 0.125
"""Share of new passes, relative to the passes of the last fit, that causes a new fit."""
BLOCK = 8
"""Most consecutive passes summed before the fit, because single passes are noisy."""
OUTLIER = 3.0
"""Multiple of the median error above which a pass counts less: first passes compile."""
ROUNDS = 6
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
_USUAL_NAMES = {
    "n_head": "num_attention_heads", "num_heads": "num_attention_heads", "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers", "n_embd": "hidden_size",
}  # fmt: skip


def with_usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with sizes of older families (``n_head``) also under usual names."""
    return {usual: config[name] for name, usual in _USUAL_NAMES.items() if name in config} | dict(config)


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a model directory, text part only; ModelError if it is missing."""
    path = Path(model_dir) / "config.json"
    try:
        config = parsed_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{model_dir}: no config.json there; give a directory in Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a model's configuration: {error}") from error
    text = with_usual_names(config.get("text_config") or config)
    return text | {"tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))}


def kv_token_bytes(config: Mapping[str, Any], dtype: str, tp: int = 1) -> int:
    """Bytes of one token's keys and values, over all layers and ranks. Key-value heads that ``tp``
    does not divide are copied: every rank has at least one."""
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype: got {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return 2 * int(config["num_hidden_layers"]) * math.ceil(heads / tp) * tp * head_dim * DTYPE_BYTES[dtype]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture's name, as ``qwen3-28x1024-h16kv8-v151936``."""
    heads = config["num_attention_heads"]
    return (
        f"{config.get('model_type', 'model')}-{config['num_hidden_layers']}x{config['hidden_size']}-h{heads}"
        f"kv{config.get('num_key_value_heads') or heads}-v{config['vocab_size']}"
    )


def tokens_within(
    budget_gib: float, token_bytes: int, max_context_tokens: int, setting: str = "rollout.kv_cache_gib"
) -> int:
    """Tokens of KV that fit into a budget; EngineError if not even one trajectory fits."""
    tokens = int(budget_gib * GIB) // token_bytes
    if tokens < max_context_tokens:
        raise EngineError(
            f"{setting}: {budget_gib:g} GiB holds {tokens} tokens of KV ({token_bytes} bytes each), and a trajectory "
            f"may have rollout.max_context_tokens={max_context_tokens}; type "
            f"{setting}={math.ceil(1e6 * max_context_tokens * token_bytes / GIB) / 1e6:g} or more"
        )
    return tokens


class PassMeter:
    """Seconds of an engine's last forward passes, and their fit. One thread adds, any may read."""

    def __init__(self) -> None:
        self.count = 0
        self._rows = np.zeros((KEPT_PASSES, 5))  # 1, sequences, context tokens, prefilled tokens, seconds
        self._rows[:, 0] = 1.0
        self._fitted: tuple[int, StepSeconds | None] = (0, None)

    def add(self, sequences: int, context_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Add a pass: ``sequences`` got a token each and attended to ``context_tokens`` in all."""
        if seconds > 0.0:
            self._rows[self.count % KEPT_PASSES, 1:] = sequences, context_tokens, prefill_tokens, seconds
            self.count += 1

    def seconds(self) -> StepSeconds | None:
        """The fit, repeated after an eighth more passes; None before `FEWEST_PASSES`."""
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
    """`StepSeconds` of passes (n, 5): 1, sequences, context and prefilled tokens, seconds."""
    size = max(1, min(BLOCK, len(rows) // FEWEST_PASSES))
    blocks = np.add.reduceat(rows, np.arange(0, len(rows), size), axis=0)
    held_out = blocks[1::2]
    error = float(np.abs(held_out[:, :4] @ _fitted(blocks[::2]) / held_out[:, 4] - 1.0).mean())
    fixed_s, sequence_s, context_token_s, prefill_token_s = (float(value) for value in _fitted(blocks))
    return StepSeconds(fixed_s, sequence_s, context_token_s, prefill_token_s, len(rows), error)


def _fitted(rows: Array) -> Array:
    from scipy.optimize import nnls  # here: importing it takes 0.2 s, and an engine is measured long after it started

    relative = rows[:, :4] / rows[:, 4:]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    relative = relative / scale
    weights, values = np.ones(len(rows)), np.zeros(4)
    for _ in range(ROUNDS):
        values = nnls(relative * weights[:, None], weights)[0]
        off = np.abs(relative @ values - 1.0)
        weights = np.sqrt(np.minimum(1.0, OUTLIER * max(1e-3, float(np.median(off))) / np.maximum(off, 1e-12)))
    return np.asarray(values / scale)
