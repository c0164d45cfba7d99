"""Rooflines: seconds of one operator on one GPU, from its datasheet and a few efficiencies.

Every constant is a fraction of a peak, a number of tiles or bytes, or a latency, so that it carries
over to other GPUs. Arrays broadcast; results are seconds; sizes are of one GPU's shard. Deviates
from Libra's planner (arXiv:2606.03077 v2), which has fixed-efficiency rooflines and divides by TP
twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.hardware.gpus import GPU
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Constants of the rooflines, one set for all GPUs, models, operators and sizes.

    Fitted to A100 matrix products and elementwise operators of Llama-2-7b, Llama-2-70b and
    Llama-3-8B (microsoft/vidur, MIT), A800 attention of Llama-2-7b (NetX-lab/Frontier, MIT), and
    A100 one-node all-reduce tables.
    """

    gemm_launch_s: float = 4.31e-06  # matrix products: fixed seconds
    gemm_flops_frac: float = 0.769  # share of peak operations inside a tile of at least 128 x 128
    gemm_small_frac: float = 0.662  # share in half such a tile; each further halving multiplies by it again
    gemm_depth: float = 36.0  # cost of starting and ending a tile, as an inner length
    gemm_wave: float = 0.378  # exponent of rounding tiles up to whole waves: 1 if all tiles took equally long
    gemm_bytes_frac: float = 0.878  # share of memory bandwidth reached
    gemm_bytes_half: float = 6e05  # bytes at which half of that share is reached
    gemm_sharpness: float = 2.34  # exponent that joins operations and memory (infinite: the slower of the two)
    move_launch_s: float = 2.98e-06  # elementwise operators: fixed seconds
    move_bytes_frac: float = 0.9  # share of memory bandwidth that the best operator reaches; assumed, not fitted
    move_emb: float = 2.19  # this and the next four: bytes per multiprocessor and cycle
    move_norm: float = 5.71
    move_rope: float = 7.03
    move_act: float = 7.26
    move_add: float = 37.6
    move_l2: float = 43.1  # bytes per cycle from the second-level cache, if the activation fits in it
    decode_launch_s: float = 1.72e-05  # attention of one new token: fixed seconds
    decode_bytes_frac: float = 0.91  # share of memory bandwidth
    decode_min_tokens: float = 61.2  # minimum KV tokens that a sequence costs
    prefill_launch_s: float = 2.27e-05  # attention of a chunk: fixed seconds
    prefill_flops_frac: float = 0.502  # share of peak operations inside a tile
    prefill_tile: float = 128.0  # query rows of a tile
    hop_s: float = 2.0e-6  # all-reduce: each of log2(workers) steps
    link_frac: float = 0.6  # share of link bandwidth
    link_half_bytes: float = 5.4e6  # bytes at which half of that share is reached


_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4)


def gemm_s(gpu: GPU, eff: Efficiencies, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike) -> Array:
    """Seconds of ``(rows, inner) @ (inner, columns)`` in bfloat16.

    Assumes that the library picks the best of a few tile sizes and splits of ``inner``, rounded up
    to waves.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(x, float) for x in (rows, columns, inner)))
    per_sm = gpu.flops_per_s / gpu.num_sms
    compute_s = np.full(m.shape, np.inf)
    for height, width in _TILES:
        area = height * width
        halvings = max(0.0, np.log2(128 * 128 / area))
        reached = eff.gemm_flops_frac * (eff.gemm_small_frac / eff.gemm_flops_frac) ** halvings
        tiles = np.ceil(m / height) * np.ceil(n / width) / gpu.num_sms
        for split in _SPLITS:
            waves = tiles * split * (np.ceil(tiles * split) / (tiles * split)) ** eff.gemm_wave
            tile_s = 2.0 * area * (k / split + eff.gemm_depth) / (per_sm * reached)
            adding_s = 0.0 if split == 1 else 8.0 * split * m * n / gpu.memory_bytes_per_s
            compute_s = np.minimum(compute_s, waves * tile_s + adding_s)
    moved = 2.0 * (m * n + n * k + m * k) + eff.gemm_bytes_half
    memory_s = moved / (gpu.memory_bytes_per_s * eff.gemm_bytes_frac)
    p = eff.gemm_sharpness
    return np.asarray(eff.gemm_launch_s + (compute_s**p + memory_s**p) ** (1.0 / p))


_MOVES = {
    "emb": ("move_emb", 2.0),
    "input_layernorm": ("move_norm", 2.0),
    "post_attention_layernorm": ("move_norm", 2.0),
    "attn_rope": ("move_rope", 2.0),
    "mlp_act": ("move_act", 3.0),
    "add": ("move_add", 3.0),
}
"""Constant of each elementwise operator, and its memory passes: one or two reads, one write."""


def move_s(gpu: GPU, eff: Efficiencies, operator: str, activation_bytes: ArrayLike) -> Array:
    """Seconds of an elementwise operator with a result of ``activation_bytes``.

    Bound by multiprocessors, or by memory and cache: low bandwidth per multiprocessor is easier to
    saturate.
    """
    size = np.asarray(activation_bytes, float)
    name, passes = _MOVES[operator]
    cycles = gpu.num_sms * gpu.clock_hz
    missed = 1.0 / (1.0 + (gpu.l2_bytes / np.maximum(passes * size, 1.0)) ** 2)
    cache_s = (1.0 - missed) / max(cycles * eff.move_l2, gpu.memory_bytes_per_s)
    memory_s = missed / (gpu.memory_bytes_per_s * eff.move_bytes_frac) + cache_s
    kernel_s = 1.0 / (cycles * getattr(eff, name))
    return np.asarray(eff.move_launch_s + passes * size * np.hypot(memory_s, kernel_s))


def attention_decode_s(
    gpu: GPU, eff: Efficiencies, num_sequences: ArrayLike, context_tokens: ArrayLike, kv_bytes: float
) -> Array:
    """Seconds of one layer's attention for one new token in each of ``num_sequences``.

    ``context_tokens`` is the total of the sequences; ``kv_bytes`` is per token, layer and GPU.
    """
    num, context = np.asarray(num_sequences, float), np.asarray(context_tokens, float)
    read = (context + eff.decode_min_tokens * num) * kv_bytes
    return np.asarray(eff.decode_launch_s + read / (gpu.memory_bytes_per_s * eff.decode_bytes_frac))


def attention_prefill_s(
    gpu: GPU, eff: Efficiencies, new_tokens: ArrayLike, past_tokens: ArrayLike, heads: float, head_dim: int
) -> Array:
    """Seconds of one layer's causal attention of a chunk over itself and ``past_tokens`` before it.

    A multiprocessor computes one tile of query rows of one head, so the last wave may be nearly
    empty.
    """
    new, past = np.asarray(new_tokens, float), np.asarray(past_tokens, float)
    tiles = np.ceil(new / eff.prefill_tile) * heads
    waves = np.ceil(tiles / gpu.num_sms)
    tile_flops = 4.0 * np.minimum(new, eff.prefill_tile) * head_dim * (past + new / 2.0)
    tile_s = tile_flops / (gpu.flops_per_s / gpu.num_sms * eff.prefill_flops_frac)
    return np.asarray(eff.prefill_launch_s + waves * tile_s)


def all_reduce_s(gpu: GPU, eff: Efficiencies, num_bytes: ArrayLike, workers: int, workers_per_node: int = 0) -> Array:
    """Seconds to sum ``num_bytes`` over ``workers``; ``workers_per_node`` 0: all on one machine.

    For the small messages of a decode step, a measured table is far more accurate.
    """
    size = np.asarray(num_bytes, float)
    if workers <= 1:
        return np.zeros_like(size)
    one_node = workers_per_node in (0, workers)
    link = gpu.link_bytes_per_s if one_node else gpu.network_bytes_per_s * workers_per_node
    volume = 2.0 * (workers - 1) / workers * size
    rate = link * eff.link_frac * size / (size + eff.link_half_bytes)
    return np.asarray(2.0 * eff.hop_s * np.log2(workers) + volume / np.maximum(rate, 1.0))


GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
"""Matrix products of a layer: query-key-value, output, gate and up, down."""
MOVES = tuple(_MOVES)
"""Elementwise operators; ``emb`` once a step, ``add`` twice a layer, the others once a layer."""
LAYER_COUNTS: Mapping[str, int] = {**dict.fromkeys(GEMMS + MOVES, 1), "emb": 0, "add": 2}
"""Runs of each operator per layer."""


class OperatorCorrection(Protocol):
    """Measured over predicted seconds of an operator."""

    def ratio(self, operator: str, tp: int, tokens: Array) -> Array:
        """A factor above 0 for each number of tokens; 1 without measurements."""


def gemm_columns_inner(operator: str, shape: ModelShape, tp: int) -> tuple[float, float]:
    """Columns and inner length of a matrix product's shard on one of ``tp`` GPUs."""
    heads, kv = shape.num_heads / tp, shape.kv_heads_per_gpu(tp)
    return {
        "attn_pre_proj": ((heads + 2 * kv) * shape.head_dim, shape.hidden),
        "attn_post_proj": (shape.hidden, heads * shape.head_dim),
        "mlp_up_proj": (2 * shape.ffn / tp, shape.hidden),
        "mlp_down_proj": (shape.hidden, shape.ffn / tp),
        "lm_head": (shape.vocab / tp, shape.hidden),
    }[operator]


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
    """Seconds of one operator for ``tokens`` tokens, on each of ``tp`` GPUs."""
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
    """Seconds of one layer's operators without attention and all-reduce."""
    counts = LAYER_COUNTS.items()
    return np.asarray(sum(n * operator_s(gpu, eff, shape, tp, name, tokens, correction) for name, n in counts if n))
