"""Analytic forms: seconds of one operator on one GPU from its datasheet and a few efficiencies.

Every constant is a fraction of a peak, a number of tiles or bytes, or a latency, so that it means something on another GPU.
Arrays broadcast; all results are seconds. Forms are per GPU: whoever shards an operator passes the shard's sizes, once.

Differs from the published planner of Libra (arXiv:2606.03077 v2), whose forms are rooflines at fixed efficiency and which divides
by TP twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.hardware.gpus import GPU

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Free constants of the forms; one set serves every GPU, model, operator and size.

    Attributes
    ----------
    gemm_launch_s : float
        Matrix products: fixed seconds.
    gemm_flops_frac, gemm_small_frac : float
        Fraction of peak operations inside a tile of at least 128 x 128, and inside one of half that size; a quarter's is
        lower again by the same factor.
    gemm_depth : float
        Inner length that starting and ending a tile costs.
    gemm_wave : float
        Exponent of rounding tiles up to whole waves of all multiprocessors: 1 if every tile took exactly as long.
    gemm_bytes_frac, gemm_bytes_half : float
        Reached fraction of memory bandwidth; bytes at which half of it is reached.
    gemm_sharpness : float
        Exponent that joins operations and memory (infinite: the slower of the two).
    move_launch_s : float
        Elementwise operators: fixed seconds.
    move_emb, move_norm, move_rope, move_act, move_add : float
        How often each passes its activation through memory: unfused kernels read and write it several times.
    l2_bytes_per_s_per_sm : float
        Bytes per second one multiprocessor draws from the second-level cache, where the activation fits in it.
    decode_launch_s, decode_bytes_frac, decode_min_tokens : float
        Attention of one new token: fixed seconds, fraction of memory bandwidth, tokens of KV that even a short sequence costs.
    prefill_launch_s, prefill_flops_frac, prefill_tile : float
        Attention of a chunk: fixed seconds, fraction of peak operations inside a tile, query rows of a tile.
    hop_s, link_frac, link_half_bytes : float
        All-reduce: seconds of each of log2(workers) steps, fraction of the links, bytes at which half of it is reached.
    """

    gemm_launch_s: float = 4.3e-6
    gemm_flops_frac: float = 0.769
    gemm_small_frac: float = 0.662
    gemm_depth: float = 36.0
    gemm_wave: float = 0.378
    gemm_bytes_frac: float = 0.878
    gemm_bytes_half: float = 6.0e5
    gemm_sharpness: float = 2.34
    move_launch_s: float = 3.1e-6
    move_emb: float = 17.7
    move_norm: float = 6.8
    move_rope: float = 5.7
    move_act: float = 8.2
    move_add: float = 3.2
    l2_bytes_per_s_per_sm: float = 31.0e9
    decode_launch_s: float = 17.0e-6
    decode_bytes_frac: float = 0.91
    decode_min_tokens: float = 61.0
    prefill_launch_s: float = 22.7e-6
    prefill_flops_frac: float = 0.502
    prefill_tile: float = 128.0
    hop_s: float = 6.0e-6
    link_frac: float = 0.6
    link_half_bytes: float = 4.0e6

    def with_values(self, **changes: float) -> Efficiencies:
        """A copy with ``changes``."""
        return replace(self, **changes)


_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4)


def gemm_s(gpu: GPU, eff: Efficiencies, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike) -> Array:
    """Seconds of ``(rows, inner) @ (inner, columns)`` in bfloat16.

    The library is taken to choose the best of a few tile sizes and splits of the inner length, each rounded up to waves.
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


_PASSES = {
    "emb": "move_emb",
    "input_layernorm": "move_norm",
    "post_attention_layernorm": "move_norm",
    "attn_rope": "move_rope",
    "mlp_act": "move_act",
    "add": "move_add",
}


def move_s(gpu: GPU, eff: Efficiencies, operator: str, activation_bytes: ArrayLike) -> Array:
    """Seconds of an elementwise operator whose result has ``activation_bytes``; see `libra.hardware.operators` for the names.

    What fits into the second-level cache moves at its rate, the rest at the memory's: a GPU with a small cache has no such relief.
    """
    size = np.asarray(activation_bytes, float)
    passes = getattr(eff, _PASSES[operator])
    missed = size / (size + gpu.l2_bytes)
    cache = 1.0 / max(gpu.num_sms * eff.l2_bytes_per_s_per_sm, gpu.memory_bytes_per_s)
    return np.asarray(eff.move_launch_s + passes * size * (missed / gpu.memory_bytes_per_s + (1.0 - missed) * cache))


def attention_decode_s(
    gpu: GPU, eff: Efficiencies, num_sequences: ArrayLike, context_tokens: ArrayLike, kv_bytes: float
) -> Array:
    """Seconds of one layer's attention for one new token each of ``num_sequences``.

    ``context_tokens`` is the sum over the sequences; ``kv_bytes`` what one token's keys and values take in this layer on this GPU.
    """
    num, context = np.asarray(num_sequences, float), np.asarray(context_tokens, float)
    read = (context + eff.decode_min_tokens * num) * kv_bytes
    return np.asarray(eff.decode_launch_s + read / (gpu.memory_bytes_per_s * eff.decode_bytes_frac))


def attention_prefill_s(
    gpu: GPU, eff: Efficiencies, new_tokens: ArrayLike, past_tokens: ArrayLike, heads: float, head_dim: int
) -> Array:
    """Seconds of one layer's causal attention of a chunk of one sequence over itself and ``past_tokens`` before it.

    A tile of query rows of one head is one block of work on one multiprocessor, so the last wave may be nearly empty.
    """
    new, past = np.asarray(new_tokens, float), np.asarray(past_tokens, float)
    tiles = np.ceil(new / eff.prefill_tile) * heads
    waves = np.ceil(tiles / gpu.num_sms)
    tile_flops = 4.0 * np.minimum(new, eff.prefill_tile) * head_dim * (past + new / 2.0)
    tile_s = tile_flops / (gpu.flops_per_s / gpu.num_sms * eff.prefill_flops_frac)
    return np.asarray(eff.prefill_launch_s + waves * tile_s)


def all_reduce_s(gpu: GPU, eff: Efficiencies, num_bytes: ArrayLike, workers: int, workers_per_node: int = 0) -> Array:
    """Seconds to add ``num_bytes`` over ``workers``; ``workers_per_node`` 0 means that one node holds them all.

    For where there is no table: alpha-beta forms are up to 71 % off at the small messages of a decode step.
    """
    size = np.asarray(num_bytes, float)
    if workers <= 1:
        return np.zeros_like(size)
    one_node = workers_per_node in (0, workers)
    link = gpu.link_bytes_per_s if one_node else gpu.network_bytes_per_s * workers_per_node
    volume = 2.0 * (workers - 1) / workers * size
    rate = link * eff.link_frac * size / (size + eff.link_half_bytes)
    return np.asarray(2.0 * eff.hop_s * np.log2(workers) + volume / np.maximum(rate, 1.0))
