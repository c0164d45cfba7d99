"""Whether a profile can be what it says: errors of unit, of GPU and of label that a fit would swallow in silence.

1. Nothing is faster than its GPU: no matrix product above the peak operations, no bytes above the memory's bandwidth.
2. A profile that equals one of another GPU, where the datasheets say that they must differ, was measured on that one.
3. A rate 8 or 1,000 times off, at its best point, is a unit.

Each finding is a sentence; whoever calibrates refuses the profile, whoever scores leaves it out and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.hardware.forms import attention_decode_s
from libra.hardware.gpus import GPU
from libra.hardware.operators import GEMMS, gemm_columns_inner
from libra.hardware.profiles import AttentionProfile, CollectiveProfile, LinearProfile, Profile, TrainingProfile
from libra.hardware.shipped import gpus_with_tables, shipped_tables
from libra.hardware.tables import RatioRows, Tables

Array = NDArray[np.float64]

FASTEST_FRAC = 1.0
"""Above this share of the peak a measurement is impossible."""
SLOWEST_FRAC = 0.2
"""Below this share at its best point a profile of matrix products or of long KV is in other units, or of another GPU."""
SAME_SPREAD = 0.08
"""Two profiles whose ratio strays less than this (5 % to 95 %, in the logarithm) around 1 are one."""
MIN_COMMON = 40
"""Fewest common points on which two profiles are called one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something impossible about a profile.

    Attributes
    ----------
    source : str
        The file.
    text : str
        What is wrong, with the numbers, and what it probably is.
    """

    source: str
    text: str


def audit(profile: Profile, gpu: GPU, others: Sequence[Tables] | None = None) -> list[Finding]:
    """What is impossible about ``profile`` on ``gpu``; empty where nothing is.

    ``others`` are tables of GPUs it may have been confused with; None: the package's.
    """
    references = [shipped_tables(g.name) for g in gpus_with_tables()] if others is None else list(others)
    if isinstance(profile, LinearProfile):
        texts = _linear(profile, gpu)
    elif isinstance(profile, AttentionProfile):
        texts = [*_attention(profile, gpu), *_twins(profile, gpu, [t for t in references if t is not None])]
    elif isinstance(profile, CollectiveProfile):
        texts = _collective(profile, gpu)
    else:
        texts = _training(profile)
    return [Finding(profile.source, text) for text in texts]


def _rate_problem(what: str, best: float, gpu: GPU, peak: str) -> list[str]:
    """Text for a share of a peak that cannot be."""
    if best > FASTEST_FRAC:
        return [
            f"{what} reach {best:.2f} of {gpu.name}'s {peak}; more than 1 is impossible: the file is of a faster GPU, or its "
            f"times are {'not in milliseconds' if best > 100 else 'off by 8 (bits for bytes)' if best > 4 else 'too small'}"
        ]
    if best < SLOWEST_FRAC:
        near = "1,000" if best < 5e-3 else "8" if best < 0.12 else "some factor"
        return [
            f"{what} reach only {best:.3g} of {gpu.name}'s {peak} at their best point, where 0.4 to 0.95 are usual: the file "
            f"is of a slower GPU, or its unit is off by {near}"
        ]
    return []


def _linear(profile: LinearProfile, gpu: GPU) -> list[str]:
    flops_frac, bytes_frac = 0.0, 0.0
    for curve in profile.curves:
        if curve.operator not in GEMMS:
            continue
        columns, inner = gemm_columns_inner(curve.operator, profile.shape, curve.tp)
        flops = 2.0 * curve.tokens * columns * inner
        moved = 2.0 * (columns * inner + curve.tokens * (columns + inner))
        flops_frac = max(flops_frac, float((flops / curve.seconds).max() / gpu.flops_per_s))
        big = moved > gpu.l2_bytes  # what fits into the cache may well beat the memory
        if big.any():
            bytes_frac = max(bytes_frac, float((moved / curve.seconds)[big].max() / gpu.memory_bytes_per_s))
    best = max(flops_frac, bytes_frac)
    if best == 0.0:
        return []
    peak = "peak operations" if flops_frac >= bytes_frac else "memory bandwidth"
    return _rate_problem("matrix products", best, gpu, peak)


def _attention(profile: AttentionProfile, gpu: GPU) -> list[str]:
    points = profile.decode
    read = 4.0 * profile.kv_heads * profile.head_dim * points[:, 0] * points[:, 1]
    big = read > 2.0 * gpu.l2_bytes
    if not big.any():
        return []
    best = float((read[big] / points[big, 2]).max() / gpu.memory_bytes_per_s)
    return _rate_problem("decode attention kernels", best, gpu, "memory bandwidth")


def _collective(profile: CollectiveProfile, gpu: GPU) -> list[str]:
    one_node = profile.workers <= profile.workers_per_node
    link = gpu.link_bytes_per_s if one_node else gpu.network_bytes_per_s * profile.workers_per_node
    factor = 2.0 * (profile.workers - 1) / profile.workers if profile.collective == "all_reduce" else 1.0
    best = float((factor * profile.num_bytes / profile.seconds).max() / link)
    if best <= FASTEST_FRAC:
        return []  # slow links are common: bridges between pairs, PCIe
    return [
        f"{profile.collective} of {profile.workers} workers reaches {best:.2f} of {gpu.name}'s links; more than 1 is "
        f"impossible: {'sizes or rates are in bits, off by 8' if best > 4 else 'the file is of faster links'}"
    ]


def _training(profile: TrainingProfile) -> list[str]:
    totals = profile.forward_s.sum(axis=1), profile.backward_s.sum(axis=1)
    if min(float(total.min()) for total in totals) <= 0:
        return [f"{profile.model}: a pass takes no time at all"]
    ratio = float(np.median(totals[1] / totals[0]))
    if not 0.8 < ratio < 6.0:
        return [
            f"{profile.model}: backward takes {ratio:.2g} times the forward pass; 1 to 4 is possible: mixed up columns?"
        ]
    return []


def _twins(profile: AttentionProfile, gpu: GPU, references: Sequence[Tables]) -> list[str]:
    """Decode attention that equals another GPU's at equal bytes of KV, against what both datasheets say."""
    found = []
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
                found.append(
                    f"decode attention takes {np.exp(middle):.2f} of what {tables.gpu.name} takes for the same bytes (5 to "
                    f"95 %: {np.exp(low):.2f} to {np.exp(high):.2f}, {len(log_ratio)} points), where memory bandwidth implies "
                    f"{expected:.2f}: it was measured on {tables.gpu.name}, not on {gpu.name}"
                )
                return found
    return found


def _log_ratio_at_equal_bytes(profile: AttentionProfile, tables: Tables, rows: RatioRows) -> Array:
    """log(measured / the reference) where both have as many sequences and bytes of KV, and more than launches matter."""
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
