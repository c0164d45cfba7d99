"""Whole steps composed of measured kernels, predicted from halves with other token counts.

A layer is its linear and elementwise operators, its attention, and two all-reduces. Most files have unsharded attention, which is
divided by the tensor-parallel degree on both sides; figures at degree 1 need no such assumption. The measured all-reduce is read
from the whole table, the predicted one from half of it. Host and scheduling are in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.cost_halves import (
    DECODE_TOKENS,
    PREFILL_TOKENS,
    START,
    Score,
    attention_s,
    from_curves,
    half_of_attention,
    half_of_linear,
    halves,
    layer_sums,
)
from benchmarks.kernel_profiles import AttentionProfile, CollectiveProfile, LinearProfile
from benchmarks.kernel_tables import all_reduce_table, fit_attention, fit_linear, linear_curves
from libra.hardware import GPU

Array = NDArray[np.float64]

CONTEXTS = (1024, 2048)
"""Contexts of the composed decode steps; the nearest measured ones of the other half are used."""


def score_composed(
    gpu: GPU,
    linear: LinearProfile,
    attention: AttentionProfile,
    reduces: Sequence[CollectiveProfile],
) -> dict[str, Score]:
    """Errors of decode and prefill layers; ``decode_tp1`` and ``prefill_tp1`` are those of degree 1."""
    errors: dict[str, list[Array]] = {"decode": [], "prefill": [], "decode_tp1": [], "prefill_tp1": []}
    for parity in (0, 1):
        learned, asked = half_of_linear(linear, True, parity), half_of_linear(linear, False, parity)
        att_learned, att_asked = half_of_attention(attention, True, parity), half_of_attention(attention, False, parity)
        eff = fit_attention([(gpu, att_learned)], fit_linear([(gpu, learned)], START))
        for tp, tokens, predicted, measured in layer_sums(
            asked, from_curves(gpu, eff, asked, linear_curves(gpu, eff, learned))
        ):
            comm = _all_reduce(reduces, tp, tokens * linear.shape.hidden * 2.0, parity)
            if comm is None:
                continue
            predicted, measured = predicted + comm[0], measured + comm[1]
            for kind, points in (
                ("decode", _decode_points(att_asked, tokens)),
                ("prefill", _prefill_points(att_asked, tokens)),
            ):
                if not len(points):
                    continue
                seconds = attention_s(kind, gpu, eff, att_learned, points)
                at = np.searchsorted(tokens, points[:, 0])
                ratio = (predicted[at] + seconds / tp) / (measured[at] + points[:, 2] / tp)
                errors[kind].append(np.abs(ratio - 1.0))
                if tp == 1:
                    errors[f"{kind}_tp1"].append(np.abs(ratio - 1.0))
    return {kind: Score(kind, np.concatenate(parts)) for kind, parts in errors.items() if parts}


def _decode_points(asked: AttentionProfile, tokens: Array) -> Array:
    """Measured decode points of ``tokens`` sequences, at the contexts nearest to `CONTEXTS`."""
    points = asked.decode
    if not len(points):
        return points
    lengths = np.unique(points[:, 1])
    wanted = [lengths[np.argmin(np.abs(lengths - context))] for context in CONTEXTS]
    kept = np.isin(points[:, 1], wanted) & np.isin(points[:, 0], tokens) & (points[:, 0] <= DECODE_TOKENS)
    return np.asarray(points[kept])


def _prefill_points(asked: AttentionProfile, tokens: Array) -> Array:
    """Measured chunks of ``tokens`` tokens, with all measured pasts."""
    points = asked.prefill
    kept = np.isin(points[:, 0], tokens) & (points[:, 0] >= PREFILL_TOKENS) if len(points) else np.zeros(0, bool)
    return np.asarray(points[kept])


def _all_reduce(
    reduces: Sequence[CollectiveProfile], tp: int, num_bytes: Array, parity: int
) -> tuple[Array, Array] | None:
    """(predicted, measured) seconds of a layer's two all-reduces; None if ``tp`` workers were not measured."""
    if tp == 1:
        return np.zeros(len(num_bytes)), np.zeros(len(num_bytes))
    for profile in reduces:
        if profile.workers == profile.workers_per_node == tp and profile.collective == "all_reduce":
            learn = halves(profile.num_bytes)[parity]
            half = replace(profile, num_bytes=profile.num_bytes[learn], seconds=profile.seconds[learn])
            return 2.0 * all_reduce_table(half).seconds(num_bytes), 2.0 * all_reduce_table(profile).seconds(num_bytes)
    return None
