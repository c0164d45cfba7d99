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
    gemm_launch_s, gemm_flops_frac, gemm_bytes_frac, gemm_bytes_half, gemm_sharpness, gemm_wave, gemm_depth, gemm_fill : float
        Matrix products: fixed seconds; reached fraction of peak operations and of memory bandwidth; bytes that every product
        pays beside its own; exponent that joins the two bounds (infinite: the larger one); exponent of tile-wave rounding;
        inner length at which half the depth is lost; largest loss by too few tiles (beyond it, split-K).
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

    gemm_launch_s: float = 5.0e-7
    gemm_flops_frac: float = 0.740
    gemm_bytes_frac: float = 0.834
    gemm_bytes_half: float = 7.8e6
    gemm_sharpness: float = 1.63
    gemm_wave: float = 0.248
    gemm_depth: float = 37.8
    gemm_fill: float = 18.6
    move_launch_s: float = 2.0e-6
    move_emb: float = 13.0
    move_norm: float = 6.0
    move_rope: float = 5.0
    move_act: float = 6.0
    move_add: float = 3.2
    l2_bytes_per_s_per_sm: float = 50.0e9
    decode_launch_s: float = 12.0e-6
    decode_bytes_frac: float = 0.87
    decode_min_tokens: float = 160.0
    prefill_launch_s: float = 20.0e-6
    prefill_flops_frac: float = 0.49
    prefill_tile: float = 128.0
    hop_s: float = 7.0e-6
    link_frac: float = 0.75
    link_half_bytes: float = 4.0e6

    def with_values(self, **changes: float) -> Efficiencies:
        """A copy with ``changes``."""
        return replace(self, **changes)


def gemm_s(gpu: GPU, eff: Efficiencies, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike) -> Array:
    """Seconds of ``(rows, inner) @ (inner, columns)`` in bfloat16."""
    m, n, k = (np.asarray(x, float) for x in (rows, columns, inner))
    waves = np.ceil(m / 128.0) * np.ceil(n / 128.0) / gpu.num_sms
    rounding = np.minimum(np.ceil(waves) / waves, eff.gemm_fill) ** eff.gemm_wave
    flops = 2.0 * (np.ceil(m / 16.0) * 16.0) * n * k
    compute_s = flops / (gpu.flops_per_s * eff.gemm_flops_frac) * rounding * (1.0 + eff.gemm_depth / k)
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
