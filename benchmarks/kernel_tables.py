"""Rooflines and tables of one GPU from its kernel profiles: how `libra/hardware/tables` was made.

``python -m benchmarks.kernel_tables FILES --save FILE.json`` writes what
`libra.hardware.tables.read_tables` reads.

1. Profiles of several GPUs, or of an unnamed one, are never fitted together.
2. A profile with a finding of `audit` is refused: a matrix product above peak FLOPS or a transfer
   above the memory bandwidth; times off by one factor (units, or another GPU).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_profiles import (
    KINDS,
    AttentionKind,
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    Profile,
    TrainingProfile,
    read_directory,
    read_profiles,
)
from benchmarks.report import command_parser
from libra.errors import ConfigError
from libra.hardware.gpus import GPU, load_gpu
from libra.hardware.layer_seconds import (
    GEMMS,
    MOVES,
    Efficiencies,
    all_reduce_s,
    gemm_columns_inner,
    gemm_s,
    operator_s,
)
from libra.hardware.run_calibration import fit_positive
from libra.hardware.tables import (
    SCHEMA,
    AllReduceTable,
    RatioCurve,
    RatioRows,
    Tables,
    log_tokens,
    operator_sizes,
)

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
"""Penalty of a factor e in a constant, as log residual per point."""


def spread(num: int, most: int = 64) -> NDArray[np.int64]:
    """At most ``most`` positions among ``num``, evenly spread over the logarithm of their rank."""
    if num <= most:
        return np.arange(num)
    return np.unique(np.round(np.geomspace(1, num, most) - 1).astype(np.int64))


def fit_forms(measured: Sequence[tuple[GPU, Profile]], start: Efficiencies | None = None) -> Efficiencies:
    """All constants that the profiles determine; the others are taken from ``start``."""
    eff = fit_linear([(gpu, p) for gpu, p in measured if isinstance(p, LinearProfile)], start)
    eff = fit_attention([(gpu, p) for gpu, p in measured if isinstance(p, AttentionProfile)], eff)
    reduces = [(gpu, p) for gpu, p in measured if isinstance(p, CollectiveProfile) and p.collective == "all_reduce"]
    return _fit(eff, REDUCE_CONSTANTS, lambda trial: [_reduce_residual(gpu, p, trial) for gpu, p in reduces])


def fit_linear(measured: Sequence[tuple[GPU, LinearProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of matrix products and elementwise operators; the others are taken from ``start``.

    A residual is the log ratio of one operator's seconds, or of their sum over a layer.
    """
    eff = start or Efficiencies()
    eff = _fit(eff, GEMM_CONSTANTS, partial(_linear_residuals, measured, GEMMS))
    return _fit(eff, MOVE_CONSTANTS, partial(_linear_residuals, measured, MOVES))


def fit_attention(measured: Sequence[tuple[GPU, AttentionProfile]], start: Efficiencies | None = None) -> Efficiencies:
    """Constants of attention; the others are taken from ``start``."""
    eff = start or Efficiencies()
    for kind, names in ATTENTION_CONSTANTS.items():
        eff = _fit(eff, names, partial(_attention_residuals, measured, kind))
    return eff


def _fit(eff: Efficiencies, names: Sequence[str], residuals: Callable[[Efficiencies], Sequence[Array]]) -> Efficiencies:
    if not sum(map(len, residuals(eff))):
        return eff

    def changed(values: Array) -> Efficiencies:
        return replace(eff, **dict(zip(names, values.tolist(), strict=True)))

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


# ---------------------------------------------------------------- tables


def linear_curves(gpu: GPU, eff: Efficiencies, profile: LinearProfile) -> list[RatioCurve]:
    """Ratios of a profile's operators to the rooflines."""
    curves = []
    for curve in profile.curves:
        predicted = operator_s(gpu, eff, profile.shape, curve.tp, curve.operator, curve.tokens)
        sizes = operator_sizes(curve.operator, profile.shape, curve.tp)
        curves.append(RatioCurve(curve.operator, sizes, np.log(curve.tokens), np.log(curve.seconds / predicted)))
    return curves


def attention_rows(gpu: GPU, eff: Efficiencies, profile: AttentionProfile, kind: AttentionKind) -> RatioRows | None:
    """Ratios of attention to the roofline by sequences or chunk length; None without points."""
    points = profile.points(kind)
    if not len(points):
        return None
    log_ratio = np.log(points[:, 2] / profile.form_s(kind, gpu, eff, points))
    firsts = np.unique(points[:, 0])
    rows = []
    for first in firsts:
        here = np.flatnonzero(points[:, 0] == first)
        here = here[np.argsort(points[here, 1])]
        rows.append((log_tokens(points[here, 1]), log_ratio[here]))
    key = (profile.heads, profile.kv_heads, float(profile.head_dim))
    return RatioRows(key, np.log(firsts), tuple(rows))


def make_tables(gpu: GPU, eff: Efficiencies, profiles: Iterable[Profile]) -> Tables:
    """Tables of profiles of this GPU."""
    every = list(profiles)
    attentions = [p for p in every if isinstance(p, AttentionProfile)]
    decode, prefill = ([attention_rows(gpu, eff, p, kind) for p in attentions] for kind in KINDS)
    return Tables(
        gpu,
        eff,
        tuple(curve for p in every if isinstance(p, LinearProfile) for curve in linear_curves(gpu, eff, p)),
        tuple(rows for rows in decode if rows is not None),
        tuple(rows for rows in prefill if rows is not None),
        tuple(all_reduce_table(p) for p in every if isinstance(p, CollectiveProfile) and p.collective == "all_reduce"),
    )


def all_reduce_table(profile: CollectiveProfile) -> AllReduceTable:
    """The table of a profile."""
    return AllReduceTable(profile.workers, profile.workers_per_node, np.log(profile.num_bytes), np.log(profile.seconds))


def save_tables(tables: Tables, path: str | Path, *, source: str, points: int = 40) -> None:
    """Write tables with at most ``points`` along each axis; log ratios keep three decimals."""
    linear = [
        {"operator": each.operator, "sizes": list(each.sizes), **_thinned(each, "log_tokens", "log_ratio", points)}
        for each in tables.linear
    ]
    all_reduce = [
        {
            "workers": each.workers, "workers_per_node": each.workers_per_node,
            **_thinned(each, "log_bytes", "log_seconds", 2 * points),
        }
        for each in tables.all_reduce
    ]  # fmt: skip
    document = {
        "schema": SCHEMA, "gpu": tables.gpu.name, "source": source,
        "efficiencies": {name: float(f"{value:.5g}") for name, value in asdict(tables.efficiencies).items()},
        "linear": linear, "all_reduce": all_reduce, "decode": [_thinned_rows(rows, points) for rows in tables.decode],
        "prefill": [_thinned_rows(rows, points) for rows in tables.prefill],
    }  # fmt: skip
    text = json.dumps(document, separators=(",", ":"))
    Path(path).write_text(text.replace('{"operator"', '\n{"operator"').replace("]],[[", "]],\n[[") + "\n")


def _rounded(values: Array, digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in values]


def _thinned(table: object, x: str, y: str, points: int) -> dict[str, list[float]]:
    keep = spread(len(getattr(table, x)), points)
    return {name: _rounded(getattr(table, name)[keep]) for name in (x, y)}


def _thinned_rows(table: RatioRows, points: int) -> dict[str, Any]:
    kept, rows = spread(len(table.log_x), points), []
    for at, ratio in (table.rows[i] for i in kept):
        keep = spread(len(at), max(8, points // 2))
        rows.append([_rounded(at[keep]), _rounded(ratio[keep])])
    return {"key": list(table.key), "log_x": _rounded(table.log_x[kept], 4), "rows": rows}


# ---------------------------------------------------------------- audit

FASTEST_FRAC = 1.05
"""Largest share of the peak that is possible; timers round."""
FASTEST_LINKS = 1.5
"""The same for links; in-network reduction makes an all-reduce seem faster than its links."""
STRANGE_FACTOR = 4.0
"""Median of measured over predicted seconds (or inverse) from which unit or GPU must be wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An impossible property of a profile."""

    source: str
    text: str


def audit(profile: Profile, gpu: GPU) -> list[Finding]:
    """Impossible properties of ``profile`` on ``gpu``."""
    if isinstance(profile, LinearProfile):
        texts = _linear(profile, gpu)
    elif isinstance(profile, AttentionProfile):
        texts = _attention(profile, gpu)
    elif isinstance(profile, CollectiveProfile):
        texts = _collective(profile, gpu)
    else:
        texts = _training(profile)
    return [Finding(profile.source, text) for text in texts]


def _rate_problem(what: str, best: float, gpu: GPU, peak: str) -> list[str]:
    if best <= FASTEST_FRAC:
        return []
    return [
        f"{what} reach {best:.2f} of {gpu.name}'s {peak}; more than 1 is impossible: the file is of a faster GPU, or in other units"
    ]


def _factor_problem(what: str, log_ratio: Array, gpu: GPU) -> list[str]:
    if not len(log_ratio):
        return []
    factor = float(np.exp(np.median(log_ratio)))
    if 1.0 / STRANGE_FACTOR <= factor <= STRANGE_FACTOR:
        return []
    return [
        f"{what} take {factor:.3g} times what {gpu.name} needs by its datasheet, at the middle of the points: other units, or "
        "another GPU"
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
        f"{profile.collective} of {profile.workers} workers reaches {best:.2f} of {gpu.name}'s links, which cannot be"
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


# ---------------------------------------------------------------- command


def calibrate(profiles: Iterable[Profile], gpu_name: str | None = None) -> Tables:
    """Fit the rooflines to profiles and build tables of the ratios.

    ``gpu_name`` defaults to the GPU in their paths. ConfigError for no kernel or collective
    profile, no or several GPUs, or an impossible profile.
    """
    used = [profile for profile in profiles if not isinstance(profile, TrainingProfile)]
    if not used:
        raise ConfigError("calibrate: no profile of kernels or collectives among these files")
    gpu = _one_gpu(used, gpu_name)
    if findings := [finding for profile in used for finding in audit(profile, gpu)]:
        lines = "\n".join(f"  {source}: {text}" for source, text in dict.fromkeys((f.source, f.text) for f in findings))
        raise ConfigError(f"calibrate: refused, these cannot be measurements of {gpu.name}:\n{lines}")
    return make_tables(gpu, fit_forms([(gpu, profile) for profile in used]), used)


def _one_gpu(profiles: Sequence[Profile], gpu_name: str | None) -> GPU:
    if gpu_name is not None:
        return load_gpu(gpu_name)
    named = sorted({profile.gpu or "" for profile in profiles})
    if len(named) == 1 and named[0]:
        return load_gpu(named[0])
    unnamed = sorted({profile.source for profile in profiles if profile.gpu is None})
    if unnamed:
        raise ConfigError(
            f"calibrate: nothing in the path of {unnamed[0]} names a GPU; type --gpu, e.g. --gpu A800-80G"
        )
    raise ConfigError(f"calibrate: profiles of {', '.join(named)}; calibrate one GPU at a time")


def main() -> None:
    """Fit the profiles of the command line, and write the tables."""
    parser = command_parser("kernel_tables", __doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--gpu", help="the GPU that was measured (default: the one in the paths)")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    profiles = [
        each for path in options.paths for each in (read_directory(path) if path.is_dir() else read_profiles(path))
    ]
    sources = ", ".join(sorted({profile.source for profile in profiles}))
    save_tables(calibrate(profiles, options.gpu), options.save, source=f"benchmarks.kernel_tables: {sources}")


if __name__ == "__main__":
    main()
