"""Halves of profiles with different token counts, and scores of one half predicted from the other.

Halves are interleaved: every second distinct token count (attention decode: tokens of KV; attention prefill: chunk length;
all-reduce: bytes; training: micro-batch and degree, as on a chessboard). Everything is done both ways and averaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_profiles import (
    KINDS,
    AttentionKind,
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    TrainingProfile,
)
from benchmarks.kernel_tables import all_reduce_table, attention_rows, fit_attention, fit_linear, linear_curves
from benchmarks.training_form import fit_training
from libra.hardware import GPU, Efficiencies
from libra.hardware.rooflines import GEMMS, LAYER_COUNTS, operator_s
from libra.hardware.tables import RatioCurve, Tables

Array = NDArray[np.float64]

START = Efficiencies(
    gemm_launch_s=4e-6,
    gemm_flops_frac=0.75,
    gemm_small_frac=0.6,
    gemm_depth=50.0,
    gemm_wave=0.5,
    gemm_bytes_frac=0.8,
    gemm_bytes_half=1e6,
    gemm_sharpness=2.0,
    move_launch_s=4e-6,
    move_emb=5.0,
    move_norm=5.0,
    move_rope=5.0,
    move_act=5.0,
    move_add=20.0,
    move_l2=30.0,
    decode_launch_s=1e-5,
    decode_bytes_frac=0.8,
    decode_min_tokens=100.0,
    prefill_launch_s=1e-5,
    prefill_flops_frac=0.5,
)
"""Round numbers to start a fit: the package's own constants were fitted to both halves of these files."""

DECODE_TOKENS, PREFILL_TOKENS = 128, 256
"""Most tokens of a decode step, fewest of a prefill."""


@dataclass(frozen=True, slots=True)
class Score:
    """Absolute errors of one file or one of its parts.

    Attributes
    ----------
    label : str
        GPU, model and what part of them.
    errors : (n,) array
        |predicted / measured - 1|.
    """

    label: str
    errors: Array

    @property
    def mape(self) -> float:
        """Mean absolute error, percent."""
        return float(100.0 * self.errors.mean())


def model_label(source: str) -> str:
    """The model in a file's path."""
    words = re.split(r"[/_\\]", str(PurePath(source).with_suffix("")))
    drop = {"compute", "mlp", "attention", "linear", "op", "profiling", "data", "vidur", "frontier", "moe", "hf"}
    kept = [word for word in words if word.lower() not in drop and not re.fullmatch(r"(?i)([ahv]\d{2,3}|l40s?)", word)]
    return "_".join(kept) or source


def halves(values: Array) -> list[NDArray[np.bool_]]:
    """For both directions, the entries to learn from: every second distinct value."""
    distinct = np.unique(values)
    return [np.isin(values, distinct[parity::2]) for parity in (0, 1)]


def half_of_linear(profile: LinearProfile, learn: bool, parity: int) -> LinearProfile:
    """The profile with half of its token counts: those to learn from, or the others."""
    counts = np.unique(np.concatenate([curve.tokens for curve in profile.curves]))
    mine = counts[parity::2] if learn else counts[1 - parity :: 2]
    curves = []
    for curve in profile.curves:
        kept = np.isin(curve.tokens, mine)
        if kept.sum() >= 2:
            curves.append(replace(curve, tokens=curve.tokens[kept], seconds=curve.seconds[kept]))
    return replace(profile, curves=tuple(curves))


def half_of_attention(profile: AttentionProfile, learn: bool, parity: int, *, both: bool = False) -> AttentionProfile:
    """The profile with half of its KV lengths (decode) and half of its chunk lengths (prefill).

    ``both``: and half of its other numbers, so that a point that is asked shares neither of its numbers with one learned from.
    """

    def half(points: Array, columns: tuple[int, ...]) -> Array:
        if not len(points):
            return points
        masks = [halves(points[:, column])[parity] for column in columns]
        return points[np.logical_and.reduce([mask if learn else ~mask for mask in masks])]

    return replace(
        profile,
        decode=half(profile.decode, (1, 0) if both else (1,)),
        prefill=half(profile.prefill, (0, 1) if both else (0,)),
    )


Predict = Callable[[str, int, Array], Array]


def from_curves(gpu: GPU, eff: Efficiencies, profile: LinearProfile, curves: Sequence[RatioCurve]) -> Predict:
    """Seconds of an operator of the profile's model: rooflines, corrected by ``curves`` of this or other models."""
    correction = Tables(gpu, eff, tuple(curves)).of(profile.shape) if curves else None
    return lambda operator, tp, tokens: operator_s(gpu, eff, profile.shape, tp, operator, tokens, correction)


def layer_sums(profile: LinearProfile, predict: Predict) -> list[tuple[int, Array, Array, Array]]:
    """(tp, tokens, predicted, measured) seconds of one layer's linear and elementwise operators, one entry per degree."""
    found = []
    for tp in sorted({curve.tp for curve in profile.curves}):
        curves = [c for c in profile.curves if c.tp == tp and LAYER_COUNTS[c.operator]]
        if not set(GEMMS) <= {c.operator for c in curves}:
            continue  # part of a layer is no step
        tokens = curves[0].tokens
        for curve in curves[1:]:
            tokens = np.intersect1d(tokens, curve.tokens)
        predicted = sum(LAYER_COUNTS[c.operator] * predict(c.operator, tp, tokens) for c in curves)
        measured = sum(LAYER_COUNTS[c.operator] * c.seconds[np.isin(c.tokens, tokens)] for c in curves)
        found.append((tp, tokens, np.asarray(predicted), np.asarray(measured)))
    return found


def score_linear(gpu: GPU, profile: LinearProfile) -> list[Score]:
    """Layer sums of each half from rooflines and tables of the other."""
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


def score_attention(gpu: GPU, profile: AttentionProfile, *, both: bool = False) -> dict[str, Score]:
    """Attention of each half from the other; ``both`` as in `half_of_attention`."""
    errors: dict[str, list[Array]] = {"decode": [], "prefill": []}
    for parity in (0, 1):
        learned = half_of_attention(profile, True, parity, both=both)
        asked = half_of_attention(profile, False, parity, both=both)
        if not (len(learned.decode) or len(learned.prefill)):
            continue
        eff = fit_attention([(gpu, learned)], START)
        for kind in KINDS:
            points = asked.points(kind)
            if len(learned.points(kind)) and len(points):
                predicted = attention_s(kind, gpu, eff, learned, points)
                errors[kind].append(np.abs(predicted / points[:, 2] - 1.0))
    return {part: Score(part, np.concatenate(values)) for part, values in errors.items() if values}


def attention_s(kind: AttentionKind, gpu: GPU, eff: Efficiencies, learned: AttentionProfile, points: Array) -> Array:
    """Seconds of attention at the first two columns of ``points``."""
    form, rows = learned.form_s(kind, gpu, eff, points), attention_rows(gpu, eff, learned, kind)
    return form if rows is None else np.asarray(form * np.exp(rows.log_ratio(points[:, 0], points[:, 1])))


def score_collective(profile: CollectiveProfile) -> Score:
    """An all-reduce of each half of the sizes from the other."""
    errors = []
    for learn in halves(profile.num_bytes):
        table = all_reduce_table(replace(profile, num_bytes=profile.num_bytes[learn], seconds=profile.seconds[learn]))
        errors.append(np.abs(table.seconds(profile.num_bytes[~learn]) / profile.seconds[~learn] - 1.0))
    return Score(f"{profile.workers}x{profile.workers_per_node}", np.concatenate(errors))


def score_training(profile: TrainingProfile) -> tuple[dict[str, Score], int]:
    """Scores of forward and backward passes, in chessboard halves of (micro-batch, degree); and the number of fitted constants."""
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
