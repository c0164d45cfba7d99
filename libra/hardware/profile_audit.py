"""Checks of profiles for wrong units, GPUs and labels, which a fit would not notice.

1. Nothing is faster than its GPU: no matrix product exceeds peak FLOPS, no transfer exceeds the memory bandwidth.
2. A profile that equals another GPU's, although the datasheets differ, was measured on that GPU.
3. If most times are too large or too small by the same factor, they are in another unit.

Each finding is a sentence. Calibration refuses such a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.hardware.gpus import GPU
from libra.hardware.operators import GEMMS, gemm_columns_inner
from libra.hardware.profiles import AttentionProfile, CollectiveProfile, LinearProfile, Profile, TrainingProfile
from libra.hardware.rooflines import Efficiencies, attention_decode_s, gemm_s
from libra.hardware.shipped import gpus_with_tables, shipped_tables
from libra.hardware.tables import RatioRows, Tables

Array = NDArray[np.float64]

FASTEST_FRAC = 1.05
"""Largest share of the peak that is possible; timers round."""
FASTEST_LINKS = 1.5
"""The same for links: switches that add in the network make an all-reduce seem faster than its links."""
STRANGE_FACTOR = 4.0
"""Median of measured over predicted seconds, or its inverse, above which the unit or the GPU is wrong."""
SAME_SPREAD = 0.08
"""Two profiles are the same if the logarithm of their ratio (5 % to 95 %) is within this distance of 0."""
MIN_COMMON = 40
"""Minimum number of common points for that comparison."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An impossible property of a profile.

    Attributes
    ----------
    source : str
        The file.
    text : str
        What is wrong, with the numbers, and the probable cause.
    measured_on : str or None
        The GPU that it was really measured on, if known.
    """

    source: str
    text: str
    measured_on: str | None = None


def audit(profile: Profile, gpu: GPU, others: Sequence[Tables] | None = None) -> list[Finding]:
    """Impossible properties of ``profile`` on ``gpu``.

    ``others`` are tables of GPUs that it may have been confused with; None: the package's.
    """
    references = [shipped_tables(g.name) for g in gpus_with_tables()] if others is None else list(others)
    if isinstance(profile, LinearProfile):
        texts = _linear(profile, gpu)
    elif isinstance(profile, AttentionProfile):
        twins = _twins(profile, gpu, [t for t in references if t is not None])
        if twins:
            return twins
        texts = _attention(profile, gpu)
    elif isinstance(profile, CollectiveProfile):
        texts = _collective(profile, gpu)
    else:
        texts = _training(profile)
    return [Finding(profile.source, text) for text in texts]


def _rate_problem(what: str, best: float, gpu: GPU, peak: str) -> list[str]:
    if best <= FASTEST_FRAC:
        return []
    why = "not in milliseconds" if best > 100 else "off by 8 (bits for bytes)" if best > 4 else "too small"
    return [
        f"{what} reach {best:.2f} of {gpu.name}'s {peak}; more than 1 is impossible: the file is of a faster GPU, or its times are "
        f"{why}"
    ]


def _factor_problem(what: str, log_ratio: Array, gpu: GPU) -> list[str]:
    if not len(log_ratio):
        return []
    factor = float(np.exp(np.median(log_ratio)))
    if 1.0 / STRANGE_FACTOR <= factor <= STRANGE_FACTOR:
        return []
    size = max(factor, 1.0 / factor)
    unit = "1,000" if size > 100 else "8" if 5 < size < 13 else f"{size:.0f}"
    return [
        f"{what} take {factor:.3g} times what {gpu.name} needs by its datasheet, at the middle of the points: units off by "
        f"{unit}, or another GPU"
    ]


def _linear(profile: LinearProfile, gpu: GPU) -> list[str]:
    shape = profile.shape
    if shape.ffn < shape.hidden:
        return [
            f"its feed-forward network is narrower ({shape.ffn}) than the model ({shape.hidden}): an expert's; mixtures of "
            "experts are not modelled"
        ]
    flops_frac, bytes_frac, ratios = 0.0, 0.0, []
    for curve in profile.curves:
        if curve.operator not in GEMMS:
            continue
        columns, inner = gemm_columns_inner(curve.operator, shape, curve.tp)
        flops = 2.0 * curve.tokens * columns * inner
        moved = 2.0 * (columns * inner + curve.tokens * (columns + inner))
        flops_frac = max(flops_frac, float((flops / curve.seconds).max() / gpu.flops_per_s))
        big = moved > 4.0 * gpu.l2_bytes  # what fits into the cache can be faster than the memory
        if big.any():
            bytes_frac = max(bytes_frac, float((moved / curve.seconds)[big].max() / gpu.memory_bytes_per_s))
        ratios.append(np.log(curve.seconds / gemm_s(gpu, Efficiencies(), curve.tokens, columns, inner)))
    return (
        _rate_problem("matrix products", flops_frac, gpu, "peak operations")
        or _rate_problem("matrix products", bytes_frac, gpu, "memory bandwidth")
        or _factor_problem("matrix products", np.concatenate(ratios) if ratios else np.zeros(0), gpu)
    )


def _attention(profile: AttentionProfile, gpu: GPU) -> list[str]:
    points = profile.decode
    token_bytes = 4.0 * profile.kv_heads * profile.head_dim
    read = token_bytes * points[:, 0] * points[:, 1]
    big = read > 4.0 * gpu.l2_bytes
    best = float((read[big] / points[big, 2]).max() / gpu.memory_bytes_per_s) if big.any() else 0.0
    form = profile.form_s("decode", gpu, Efficiencies(), points)
    return _rate_problem("decode attention kernels", best, gpu, "memory bandwidth") or _factor_problem(
        "decode attention kernels", np.log(points[big, 2] / form[big]), gpu
    )


def _collective(profile: CollectiveProfile, gpu: GPU) -> list[str]:
    one_node = profile.workers <= profile.workers_per_node
    link = gpu.link_bytes_per_s if one_node else gpu.network_bytes_per_s * profile.workers_per_node
    factor = 2.0 * (profile.workers - 1) / profile.workers if profile.collective == "all_reduce" else 1.0
    best = float((factor * profile.num_bytes / profile.seconds).max() / link)
    if best <= FASTEST_LINKS:
        return []  # slow links are common: bridges between pairs, PCIe
    return [
        f"{profile.collective} of {profile.workers} workers reaches {best:.2f} of {gpu.name}'s links, which "
        f"cannot be: {'sizes or rates are in bits, off by 8' if best > 4 else 'the file is of faster links'}"
    ]


def _training(profile: TrainingProfile) -> list[str]:
    totals = profile.forward_s.sum(axis=1), profile.backward_s.sum(axis=1)
    if min(float(total.min()) for total in totals) <= 0:
        return [f"{profile.model}: a pass takes no time at all"]
    ratio = float(np.median(totals[1] / totals[0]))
    if not 0.8 < ratio < 6.0:
        return [
            f"{profile.model}: backward takes {ratio:.2g} times the forward pass; 1 to 4 is plausible: are columns mixed up?"
        ]
    return []


def _twins(profile: AttentionProfile, gpu: GPU, references: Sequence[Tables]) -> list[Finding]:
    """Decode attention that equals another GPU's at equal bytes of KV, although the datasheets differ."""
    for tables in references:
        expected = tables.gpu.memory_bytes_per_s / gpu.memory_bytes_per_s
        if abs(np.log(expected)) < 2.5 * SAME_SPREAD:
            continue
        for rows in tables.decode:
            log_ratio = _log_ratio_at_equal_bytes(profile, tables, rows)
            if len(log_ratio) < MIN_COMMON:
                continue
            low, middle, high = np.quantile(log_ratio, [0.05, 0.5, 0.95])
            if abs(middle) < SAME_SPREAD and high - low < 2.0 * SAME_SPREAD:
                text = (
                    f"decode attention takes {np.exp(middle):.2f} of what {tables.gpu.name} takes for the same bytes (5 to "
                    f"95 %: {np.exp(low):.2f} to {np.exp(high):.2f}, {len(log_ratio)} points), where memory bandwidth implies "
                    f"{expected:.2f}: it was measured on {tables.gpu.name}, not on {gpu.name}"
                )
                return [Finding(profile.source, text, tables.gpu.name)]
    return []


def _log_ratio_at_equal_bytes(profile: AttentionProfile, tables: Tables, rows: RatioRows) -> Array:
    """log(measured / reference) where both have as many sequences and bytes of KV, above the cost of a launch."""
    points = profile.decode
    token_bytes = 4.0 * profile.kv_heads * profile.head_dim
    reference_bytes = 4.0 * rows.key[1] * rows.key[2]
    context = points[:, 1] * token_bytes / reference_bytes
    longest = max(np.exp(at[-1]) for at, _ in rows.rows) - 64.0
    read = points[:, 0] * points[:, 1] * token_bytes
    common = (
        (points[:, 0] >= np.exp(rows.log_x[0]) * 0.99)
        & (points[:, 0] <= np.exp(rows.log_x[-1]) * 1.01)
        & (context <= longest)
        & (context >= 32)
        & (read > 1e6)
    )
    num, context = points[common, 0], context[common]
    if not len(num):
        return np.zeros(0)
    form = attention_decode_s(tables.gpu, tables.efficiencies, num, num * context, reference_bytes)
    return np.asarray(np.log(points[common, 2] / form) - rows.log_ratio(num, context))
