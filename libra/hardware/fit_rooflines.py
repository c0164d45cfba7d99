"""Constants of the rooflines from profiles: one set for every size, model and tensor-parallel degree that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from libra.hardware.gpus import GPU
from libra.hardware.least_squares import fit_positive
from libra.hardware.operators import GEMMS, MOVES, operator_s
from libra.hardware.profiles import AttentionKind, AttentionProfile, CollectiveProfile, LinearProfile, Profile
from libra.hardware.rooflines import Efficiencies, all_reduce_s

Array = NDArray[np.float64]

_NAMES = [field.name for field in fields(Efficiencies)]
GEMM_CONSTANTS = tuple(name for name in _NAMES if name.startswith("gemm_"))
MOVE_CONSTANTS = tuple(name for name in _NAMES if name.startswith("move_") and name != "move_bytes_frac")
ATTENTION_CONSTANTS: dict[AttentionKind, tuple[str, ...]] = {
    "decode": tuple(name for name in _NAMES if name.startswith("decode_")),
    "prefill": ("prefill_launch_s", "prefill_flops_frac"),
}
REDUCE_CONSTANTS = ("hop_s", "link_frac", "link_half_bytes")

TETHER = 0.03
"""Penalty of a factor e of a constant, as log residual per point: one model at one degree does not determine all
constants."""


def spread(num: int, most: int = 64) -> NDArray[np.int64]:
    """At most ``most`` positions among ``num``, evenly spread over the logarithm of their rank."""
    if num <= most:
        return np.arange(num)
    return np.unique(np.round(np.geomspace(1, num, most) - 1).astype(np.int64))


def fit_forms(measured: Sequence[tuple[GPU, Profile]], start: Efficiencies | None = None) -> Efficiencies:
    """All constants that the profiles determine; the others are those of ``start``."""
    eff = fit_linear([(gpu, p) for gpu, p in measured if isinstance(p, LinearProfile)], start)
    eff = fit_attention([(gpu, p) for gpu, p in measured if isinstance(p, AttentionProfile)], eff)
    reduces = [(gpu, p) for gpu, p in measured if isinstance(p, CollectiveProfile) and p.collective == "all_reduce"]
    return _fit(eff, REDUCE_CONSTANTS, lambda trial: [_reduce_residual(gpu, p, trial) for gpu, p in reduces])


def fit_linear(measured: Sequence[tuple[GPU, LinearProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of matrix products and elementwise operators; the others are those of ``start``.

    A residual is the log ratio of one operator's seconds, or of their sum over a layer.
    """
    eff = start or Efficiencies()
    eff = _fit(eff, GEMM_CONSTANTS, partial(_linear_residuals, measured, GEMMS))
    return _fit(eff, MOVE_CONSTANTS, partial(_linear_residuals, measured, MOVES))


def fit_attention(measured: Sequence[tuple[GPU, AttentionProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of attention; the others are those of ``start``."""
    eff = start or Efficiencies()
    for kind, names in ATTENTION_CONSTANTS.items():
        eff = _fit(eff, names, partial(_attention_residuals, measured, kind))
    return eff


def _fit(eff: Efficiencies, names: Sequence[str], residuals: Callable[[Efficiencies], Sequence[Array]]) -> Efficiencies:
    """``eff`` with other constants ``names``; unchanged without residuals."""
    if not sum(map(len, residuals(eff))):
        return eff

    def changed(values: Array) -> Efficiencies:
        return eff.with_values(**dict(zip(names, values.tolist(), strict=True)))

    start = np.array([getattr(eff, name) for name in names])
    ceiling = np.array([1.0 if name.endswith("_frac") else np.inf for name in names])
    return changed(
        fit_positive(lambda values: np.concatenate(residuals(changed(values))), start, tether=TETHER, ceiling=ceiling)
    )


def _linear_residuals(
    measured: Sequence[tuple[GPU, LinearProfile]], operators: Sequence[str], eff: Efficiencies
) -> list[Array]:
    parts = []
    for gpu, profile in measured:
        for tp in sorted({curve.tp for curve in profile.curves}):
            curves = [c for c in profile.curves if c.tp == tp and c.operator in operators]
            total_predicted, total_measured = np.zeros(()), np.zeros(())
            for curve in curves:
                chosen = spread(len(curve.tokens))
                seconds = curve.seconds[chosen]
                found = operator_s(gpu, eff, profile.shape, tp, curve.operator, curve.tokens[chosen])
                parts.append(0.5 * np.log(found / seconds))
                if len(chosen) == len(spread(len(curves[0].tokens))):
                    total_predicted, total_measured = total_predicted + found, total_measured + seconds
            if np.ndim(total_predicted):
                parts.append(np.log(total_predicted / total_measured))
    return parts


def _attention_residuals(
    measured: Sequence[tuple[GPU, AttentionProfile]], kind: AttentionKind, eff: Efficiencies
) -> list[Array]:
    parts = []
    for gpu, profile in measured:
        points = profile.points(kind)
        if kind == "decode":
            points = points[:: max(1, len(points) // 800)]
        parts.append(np.log(profile.form_s(kind, gpu, eff, points) / points[:, 2]))
    return parts


def _reduce_residual(gpu: GPU, profile: CollectiveProfile, eff: Efficiencies) -> Array:
    chosen = spread(len(profile.num_bytes))
    found = all_reduce_s(gpu, eff, profile.num_bytes[chosen], profile.workers, profile.workers_per_node)
    return np.log(found / profile.seconds[chosen])
