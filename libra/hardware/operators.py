"""The operators of one decoder layer, by their names in kernel profiles, and their sizes on one of ``tp`` GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.hardware.gpus import GPU
from libra.hardware.rooflines import Efficiencies, gemm_s, move_s
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]

GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
"""Matrix products of a layer: query-key-value, output, gate and up, down."""
MOVES = ("emb", "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
"""Elementwise operators; ``emb`` once a step, ``add`` twice a layer, the others once a layer."""
LAYER_COUNTS: Mapping[str, int] = {**dict.fromkeys(GEMMS + MOVES, 1), "emb": 0, "add": 2}
"""How often a layer runs each."""


class OperatorCorrection(Protocol):
    """Measured over predicted seconds of an operator."""

    def ratio(self, operator: str, tp: int, tokens: Array) -> Array:
        """A factor above 0 for each number of tokens; 1 without measurements."""


def gemm_columns_inner(operator: str, shape: ModelShape, tp: int) -> tuple[float, float]:
    """Columns and inner length of a matrix product's shard on one of ``tp`` GPUs."""
    heads, kv = shape.num_heads / tp, shape.kv_heads_per_gpu(tp)
    sizes = {
        "attn_pre_proj": ((heads + 2 * kv) * shape.head_dim, shape.hidden),
        "attn_post_proj": (shape.hidden, heads * shape.head_dim),
        "mlp_up_proj": (2 * shape.ffn / tp, shape.hidden),
        "mlp_down_proj": (shape.hidden, shape.ffn / tp),
        "lm_head": (shape.vocab / tp, shape.hidden),
    }
    return sizes[operator]


def activation_bytes(operator: str, shape: ModelShape, tp: int) -> float:
    """Bytes per token that an elementwise operator writes (rope: queries and keys)."""
    width = {
        "attn_rope": (shape.num_heads / tp + shape.kv_heads_per_gpu(tp)) * shape.head_dim,
        "mlp_act": shape.ffn / tp,
    }
    return width.get(operator, float(shape.hidden)) * shape.bytes_per_weight


def operator_s(
    gpu: GPU,
    eff: Efficiencies,
    shape: ModelShape,
    tp: int,
    operator: str,
    tokens: ArrayLike,
    correction: OperatorCorrection | None = None,
) -> Array:
    """Seconds of one operator for ``tokens`` at once, on each of ``tp`` GPUs."""
    num = np.asarray(tokens, float)
    if operator in MOVES:
        seconds = move_s(gpu, eff, operator, num * activation_bytes(operator, shape, tp))
    else:
        seconds = gemm_s(gpu, eff, num, *gemm_columns_inner(operator, shape, tp))
    return seconds if correction is None else seconds * correction.ratio(operator, tp, num)


def layer_s(
    gpu: GPU,
    eff: Efficiencies,
    shape: ModelShape,
    tp: int,
    tokens: ArrayLike,
    correction: OperatorCorrection | None = None,
) -> Array:
    """Seconds of all linear and elementwise operators of one layer, without attention and all-reduce."""
    parts = [
        count * operator_s(gpu, eff, shape, tp, operator, tokens, correction)
        for operator, count in LAYER_COUNTS.items()
        if count
    ]
    return np.asarray(sum(parts))
