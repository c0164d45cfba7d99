"""Constants of the forms from profiles: one set for every size, model and tensor-parallel degree that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from libra.hardware.gpus import GPU
from libra.hardware.least_squares import fit_positive
from libra.hardware.operators import GEMMS, MOVES, activation_bytes, gemm_columns_inner
from libra.hardware.profiles import AttentionProfile, CollectiveProfile, LinearProfile, Profile
from libra.hardware.rooflines import Efficiencies, all_reduce_s, attention_decode_s, attention_prefill_s, gemm_s, move_s

Array = NDArray[np.float64]

GEMM_CONSTANTS = tuple(f.name for f in fields(Efficiencies) if f.name.startswith("gemm_"))
MOVE_CONSTANTS = tuple(
    f.name for f in fields(Efficiencies) if f.name.startswith("move_") and f.name != "move_bytes_frac"
)
DECODE_CONSTANTS = tuple(f.name for f in fields(Efficiencies) if f.name.startswith("decode_"))
REDUCE_CONSTANTS = ("hop_s", "link_frac", "link_half_bytes")
PREFILL_CONSTANTS = tuple(f.name for f in fields(Efficiencies) if f.name.startswith("prefill_"))

_POINTS_PER_CURVE = 64
TETHER = 0.03
"""Log residual per point worth a factor e of a constant: one model at one degree does not tell all of them apart."""


def spread(num: int, most: int = _POINTS_PER_CURVE) -> NDArray[np.int64]:
    """At most ``most`` positions among ``num``, evenly spread over the logarithm of their rank."""
    if num <= most:
        return np.arange(num)
    return np.unique(np.round(np.geomspace(1, num, most) - 1).astype(np.int64))


def fit_linear(measured: Sequence[tuple[GPU, LinearProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of matrix products and elementwise operators; the others are those of ``start``.

    A residual is the log ratio of one operator's seconds, and, since steps are what counts, of their sum over a layer.
    """
    eff = start or Efficiencies()
    eff = _fit_some(eff, GEMM_CONSTANTS, lambda trial: _linear_residuals(measured, GEMMS, trial))
    return _fit_some(eff, MOVE_CONSTANTS, lambda trial: _linear_residuals(measured, MOVES, trial))


def fit_attention(measured: Sequence[tuple[GPU, AttentionProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of attention; the others are those of ``start``."""
    eff = start or Efficiencies()
    if any(len(profile.decode) for _, profile in measured):
        eff = _fit_some(eff, DECODE_CONSTANTS, lambda trial: _decode_residuals(measured, trial))
    if any(len(profile.prefill) for _, profile in measured):
        eff = _fit_some(
            eff, ("prefill_launch_s", "prefill_flops_frac"), lambda trial: _prefill_residuals(measured, trial)
        )
    return eff


def fit_all_reduce(
    measured: Sequence[tuple[GPU, CollectiveProfile]], start: Efficiencies | None = None
) -> Efficiencies:
    """Constants of the all-reduce; the others are those of ``start``."""
    eff = start or Efficiencies()
    used = [(gpu, p) for gpu, p in measured if p.collective == "all_reduce"]
    if not used:
        return eff
    return _fit_some(eff, REDUCE_CONSTANTS, lambda trial: _reduce_residuals(used, trial))


def fit_forms(measured: Sequence[tuple[GPU, Profile]], start: Efficiencies | None = None) -> Efficiencies:
    """All constants that the profiles speak of; the others are those of ``start``."""
    eff = start or Efficiencies()
    linear = [(gpu, p) for gpu, p in measured if isinstance(p, LinearProfile)]
    attention = [(gpu, p) for gpu, p in measured if isinstance(p, AttentionProfile)]
    reduces = [(gpu, p) for gpu, p in measured if isinstance(p, CollectiveProfile)]
    eff = fit_linear(linear, eff) if linear else eff
    eff = fit_attention(attention, eff) if attention else eff
    return fit_all_reduce(reduces, eff)


def _reduce_residuals(measured: Sequence[tuple[GPU, CollectiveProfile]], eff: Efficiencies) -> Array:
    parts = []
    for gpu, profile in measured:
        chosen = spread(len(profile.num_bytes))
        found = all_reduce_s(gpu, eff, profile.num_bytes[chosen], profile.workers, profile.workers_per_node)
        parts.append(np.log(found / profile.seconds[chosen]))
    return np.concatenate(parts)


def _fit_some(eff: Efficiencies, names: Sequence[str], residuals) -> Efficiencies:  # type: ignore[no-untyped-def]
    start = np.array([getattr(eff, name) for name in names])

    def of(values: Array) -> Array:
        return np.asarray(residuals(eff.with_values(**dict(zip(names, values.tolist(), strict=True)))))

    ceiling = np.array([1.0 if name.endswith("_frac") else np.inf for name in names])
    found = np.minimum(fit_positive(of, start, tether=TETHER, ceiling=ceiling), ceiling)
    return eff.with_values(**dict(zip(names, found.tolist(), strict=True)))


def _linear_residuals(
    measured: Sequence[tuple[GPU, LinearProfile]], operators: Sequence[str], eff: Efficiencies
) -> Array:
    parts = []
    for gpu, profile in measured:
        shape = profile.shape
        for tp in sorted({curve.tp for curve in profile.curves}):
            curves = [c for c in profile.curves if c.tp == tp and c.operator in operators]
            total_predicted, total_measured = np.zeros(()), np.zeros(())
            for curve in curves:
                chosen = spread(len(curve.tokens))
                tokens, seconds = curve.tokens[chosen], curve.seconds[chosen]
                if curve.operator in MOVES:
                    found = move_s(gpu, eff, curve.operator, tokens * activation_bytes(curve.operator, shape, tp))
                else:
                    found = gemm_s(gpu, eff, tokens, *gemm_columns_inner(curve.operator, shape, tp))
                parts.append(0.5 * np.log(found / seconds))
                if len(chosen) == len(spread(len(curves[0].tokens))):
                    total_predicted, total_measured = total_predicted + found, total_measured + seconds
            if np.ndim(total_predicted):
                parts.append(np.log(total_predicted / total_measured))
    return np.concatenate(parts)


def _decode_residuals(measured: Sequence[tuple[GPU, AttentionProfile]], eff: Efficiencies) -> Array:
    parts = []
    for gpu, profile in measured:
        points = profile.decode[:: max(1, len(profile.decode) // 800)]
        kv_bytes = 4.0 * profile.kv_heads * profile.head_dim
        found = attention_decode_s(gpu, eff, points[:, 0], points[:, 0] * points[:, 1], kv_bytes)
        parts.append(np.log(found / points[:, 2]))
    return np.concatenate(parts)


def _prefill_residuals(measured: Sequence[tuple[GPU, AttentionProfile]], eff: Efficiencies) -> Array:
    parts = []
    for gpu, profile in measured:
        points = profile.prefill
        found = attention_prefill_s(gpu, eff, points[:, 0], points[:, 1], profile.heads, profile.head_dim)
        parts.append(np.log(found / points[:, 2]))
    return np.concatenate(parts)
