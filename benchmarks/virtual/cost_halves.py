"""Halves of profiles with different token counts, and scores of one half predicted from the other.

Halves are interleaved: every second distinct token count (attention decode: tokens of KV; attention
prefill: chunk length; all-reduce: bytes; training: micro-batch and degree, as on a chessboard).
Everything is done both ways and averaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_profiles import (
    AttentionKind,
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    TrainingProfile,
)
from benchmarks.kernel_tables import all_reduce_table, attention_rows, fit_attention, fit_linear, linear_curves
from libra.hardware import GPU, Efficiencies
from libra.hardware.rooflines import GEMMS, LAYER_COUNTS, operator_s
from libra.hardware.run_calibration import fit_positive
from libra.hardware.tables import RatioCurve, Tables

Array = NDArray[np.float64]

START = Efficiencies(
    gemm_launch_s=4e-6, gemm_flops_frac=0.75, gemm_small_frac=0.6, gemm_depth=50.0, gemm_wave=0.5, gemm_bytes_frac=0.8,
    gemm_bytes_half=1e6, gemm_sharpness=2.0, move_launch_s=4e-6, move_emb=5.0, move_norm=5.0, move_rope=5.0,
    move_act=5.0, move_add=20.0, move_l2=30.0, decode_launch_s=1e-5, decode_bytes_frac=0.8, decode_min_tokens=100.0,
    prefill_launch_s=1e-5, prefill_flops_frac=0.5,
)  # fmt: skip
"""Round numbers, because the package's constants were fitted to both halves."""

DECODE_TOKENS, PREFILL_TOKENS = 128, 256
"""Most tokens of a decode step, fewest of a prefill."""


@dataclass(frozen=True, slots=True)
class Score:
    """Absolute errors of one file or one of its parts."""

    label: str
    errors: Array

    @property
    def mape(self) -> float:
        return float(100.0 * self.errors.mean())


def model_label(source: str) -> str:
    words = re.split(r"[/_\\]", str(PurePath(source).with_suffix("")))
    drop = {"compute", "mlp", "attention", "linear", "op", "profiling", "data", "vidur", "frontier", "moe", "hf"}
    kept = [word for word in words if word.lower() not in drop and not re.fullmatch(r"(?i)([ahv]\d{2,3}|l40s?)", word)]
    return "_".join(kept) or source


def halves(values: Array) -> list[NDArray[np.bool_]]:
    distinct = np.unique(values)
    return [np.isin(values, distinct[parity::2]) for parity in (0, 1)]


def half_of_linear(profile: LinearProfile, learn: bool, parity: int) -> LinearProfile:
    counts = np.unique(np.concatenate([curve.tokens for curve in profile.curves]))
    mine = counts[parity::2] if learn else counts[1 - parity :: 2]
    curves = []
    for curve in profile.curves:
        kept = np.isin(curve.tokens, mine)
        if kept.sum() >= 2:
            curves.append(replace(curve, tokens=curve.tokens[kept], seconds=curve.seconds[kept]))
    return replace(profile, curves=tuple(curves))


def half_of_attention(profile: AttentionProfile, learn: bool, parity: int) -> AttentionProfile:
    """The profile with half of its KV lengths (decode) and half of its chunk lengths (prefill)."""

    def half(points: Array, column: int) -> Array:
        if not len(points):
            return points
        mask = halves(points[:, column])[parity]
        return points[mask if learn else ~mask]

    return replace(profile, decode=half(profile.decode, 1), prefill=half(profile.prefill, 0))


Predict = Callable[[str, int, Array], Array]


def from_curves(gpu: GPU, eff: Efficiencies, profile: LinearProfile, curves: Sequence[RatioCurve]) -> Predict:
    """Seconds of an operator of the profile's model: rooflines corrected by ``curves``."""
    correction = Tables(gpu, eff, tuple(curves)).of(profile.shape) if curves else None
    return lambda operator, tp, tokens: operator_s(gpu, eff, profile.shape, tp, operator, tokens, correction)


def layer_sums(profile: LinearProfile, predict: Predict) -> list[tuple[int, Array, Array, Array]]:
    """(tp, tokens, predicted, measured) seconds of a layer's linear and elementwise operators."""
    found = []
    for tp in sorted({curve.tp for curve in profile.curves}):
        curves = [c for c in profile.curves if c.tp == tp and LAYER_COUNTS[c.operator]]
        if not set(GEMMS) <= {c.operator for c in curves}:
            continue  # part of a layer is not a step
        tokens = curves[0].tokens
        for curve in curves[1:]:
            tokens = np.intersect1d(tokens, curve.tokens)
        predicted = sum(LAYER_COUNTS[c.operator] * predict(c.operator, tp, tokens) for c in curves)
        measured = sum(LAYER_COUNTS[c.operator] * c.seconds[np.isin(c.tokens, tokens)] for c in curves)
        found.append((tp, tokens, np.asarray(predicted), np.asarray(measured)))
    return found


def score_linear(gpu: GPU, profile: LinearProfile) -> list[Score]:
    errors: dict[str, list[Array]] = {"decode": [], "prefill": [], "": []}
    for parity in (0, 1):
        learned, asked = half_of_linear(profile, True, parity), half_of_linear(profile, False, parity)
        eff = fit_linear([(gpu, learned)], START)
        for _, tokens, predicted, measured in layer_sums(
            asked, from_curves(gpu, eff, asked, linear_curves(gpu, eff, learned))
        ):
            error = np.abs(predicted / measured - 1.0)
            errors[""].append(error)
            errors["decode"].append(error[tokens <= DECODE_TOKENS])
            errors["prefill"].append(error[tokens >= PREFILL_TOKENS])
    return [Score(part, np.concatenate(values)) for part, values in errors.items() if values]


def attention_s(kind: AttentionKind, gpu: GPU, eff: Efficiencies, learned: AttentionProfile, points: Array) -> Array:
    form, rows = learned.form_s(kind, gpu, eff, points), attention_rows(gpu, eff, learned, kind)
    return form if rows is None else np.asarray(form * np.exp(rows.log_ratio(points[:, 0], points[:, 1])))


def score_training(profile: TrainingProfile) -> tuple[dict[str, Score], int]:
    """Scores of training passes in chessboard halves of (micro-batch, degree), and fitted
    constants."""
    sizes, degrees = (np.unique(profile.points[:, i]).tolist() for i in (0, 1))
    colour = np.array([(sizes.index(size) + degrees.index(tp)) % 2 for size, tp in profile.points])
    scores, constants = {}, 0
    for name, seconds in (("forward", profile.forward_s.sum(axis=1)), ("backward", profile.backward_s.sum(axis=1))):
        errors = []
        for learn in (colour == 0, colour == 1):
            if min(learn.sum(), (~learn).sum()) < 2:
                continue
            form = fit_training(profile.points[learn], seconds[learn])
            constants = max(constants, form.num_constants)
            asked = profile.points[~learn]
            predicted = np.array([float(form.seconds(size, int(tp))) for size, tp in asked])
            errors.append(np.abs(predicted / seconds[~learn] - 1.0))
        if errors:
            scores[name] = Score(name, np.concatenate(errors))
    return scores, constants


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """Seconds of a pass over a micro-batch: ``fixed + size x (work / tp + link[tp])``, fitted to a
    profile.

    Links are constants per degree, because two GPUs may share a bridge that four do not.
    """

    fixed_s: float
    work_s: float
    link_s: Mapping[int, float]
    log_sizes: Mapping[int, Array]
    log_ratio: Mapping[int, Array]

    @property
    def num_constants(self) -> int:
        return 2 + len(self.link_s)

    def form_s(self, size: Array, tp: int) -> Array:
        link = self.link_s.get(tp, 0.0)
        return np.asarray(self.fixed_s + np.asarray(size, float) * (self.work_s / tp + link))

    def seconds(self, size: Array, tp: int) -> Array:
        seconds = self.form_s(size, tp)
        if tp in self.log_sizes:
            seconds = seconds * np.exp(np.interp(np.log(size), self.log_sizes[tp], self.log_ratio[tp]))
        return np.asarray(seconds)


def fit_training(points: Array, seconds: Array) -> TrainingForm:
    sizes, tps = points[:, 0], points[:, 1].astype(int)
    degrees = sorted({int(tp) for tp in tps if tp > 1})
    start = np.array(
        [0.1 * seconds.min(), float(np.median(seconds / sizes * tps)) / 2, *[seconds.min() / 4] * len(degrees)]
    )

    def form(values: Array) -> TrainingForm:
        return TrainingForm(values[0], values[1], dict(zip(degrees, values[2:].tolist(), strict=True)), {}, {})

    def residuals(values: Array) -> Array:
        trial = form(values)
        return np.log(np.array([trial.form_s(b, tp) for b, tp in zip(sizes, tps, strict=True)]) / seconds)

    fitted = form(
        fit_positive(residuals, start, tether=0.003)
    )  # a constant that the points do not determine stays where it began
    log_sizes, log_ratio = {}, {}
    for tp in sorted(set(tps.tolist())):
        here = np.flatnonzero(tps == tp)[np.argsort(sizes[tps == tp])]
        log_sizes[tp] = np.log(sizes[here])
        log_ratio[tp] = np.log(seconds[here] / fitted.form_s(sizes[here], tp))
    return replace(fitted, log_sizes=log_sizes, log_ratio=log_ratio)


# Whole steps composed of measured kernels: a layer is its linear and elementwise operators, its attention and two all-reduces.
# Most files have unsharded attention, which is divided by the degree on both sides. Host and scheduling are in neither.

CONTEXTS = (1024, 2048)
"""Contexts of the composed decode steps; the nearest measured ones of the other half are used."""


def score_composed(
    gpu: GPU, linear: LinearProfile, attention: AttentionProfile, reduces: Sequence[CollectiveProfile]
) -> dict[str, Score]:
    errors: dict[str, list[Array]] = {"decode": [], "prefill": []}
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
    return {kind: Score(kind, np.concatenate(parts)) for kind, parts in errors.items() if parts}


def _decode_points(asked: AttentionProfile, tokens: Array) -> Array:
    points = asked.decode
    if not len(points):
        return points
    lengths = np.unique(points[:, 1])
    wanted = [lengths[np.argmin(np.abs(lengths - context))] for context in CONTEXTS]
    kept = np.isin(points[:, 1], wanted) & np.isin(points[:, 0], tokens) & (points[:, 0] <= DECODE_TOKENS)
    return np.asarray(points[kept])


def _prefill_points(asked: AttentionProfile, tokens: Array) -> Array:
    points = asked.prefill
    kept = np.isin(points[:, 0], tokens) & (points[:, 0] >= PREFILL_TOKENS) if len(points) else np.zeros(0, bool)
    return np.asarray(points[kept])


def _all_reduce(
    reduces: Sequence[CollectiveProfile], tp: int, num_bytes: Array, parity: int
) -> tuple[Array, Array] | None:
    if tp == 1:
        return np.zeros(len(num_bytes)), np.zeros(len(num_bytes))
    for profile in reduces:
        if profile.workers == profile.workers_per_node == tp and profile.collective == "all_reduce":
            learn = halves(profile.num_bytes)[parity]
            half = replace(profile, num_bytes=profile.num_bytes[learn], seconds=profile.seconds[learn])
            return 2.0 * all_reduce_table(half).seconds(num_bytes), 2.0 * all_reduce_table(profile).seconds(num_bytes)
    return None
