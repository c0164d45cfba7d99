"""Prediction errors of the cost model on kernels, steps and training passes that it has not seen.
No GPU is needed.

``--data DIR`` holds profiles in the layouts of Vidur, Frontier and Sailor, any subset under any
names (a GPU is read from the path); the default is the excerpt in ``benchmarks/data``. Impossible
profiles are left out by name. Figures are percent, also by GPU and model:

* ``decode_mape``: decode steps of up to 128 tokens, composed of measured kernels: a layer is its
  linear and elementwise operators, its attention and two all-reduces. Most files have unsharded
  attention, which is divided by the degree on both sides. Host and scheduling are in neither. Where
  attention of a shape was not measured, these are layers without it, as the output notes.
* ``training_mape``: forward and backward passes of training.
* ``transfer_model_mape``: layers of a model left out, of which the other files of its GPU were seen.

The first two predict one half of a file from the other, both ways. Halves are interleaved: every
second distinct token count (attention: tokens of KV; all-reduce: bytes; training: micro-batch and
degree, as on a chessboard). Constants are fitted to the half that is learned from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_profiles import (
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    Profile,
    TrainingProfile,
    read_directory,
)
from benchmarks.kernel_tables import all_reduce_table, attention_rows, audit, fit_attention, fit_linear, linear_curves
from benchmarks.report import DATA, Figure, command_parser, emit
from libra.hardware import GPU, Efficiencies, load_gpu
from libra.hardware.layer_seconds import GEMMS, LAYER_COUNTS, operator_s
from libra.hardware.run_calibration import fit_positive
from libra.hardware.tables import RatioCurve, Tables

Array = NDArray[np.float64]

EXCERPT = DATA / "hardware"
GOALS = {"decode_mape": 8.0, "training_mape": 15.0, "transfer_model_mape": 5.0}
DEFAULT = "A100-80G"
"""The datasheet of a profile whose GPU is unknown."""
FEWEST_POINTS = 10
"""Fewest distinct points of a scored training profile: halves are a chessboard of them."""
START = Efficiencies(
    gemm_launch_s=4e-6, gemm_flops_frac=0.75, gemm_small_frac=0.6, gemm_depth=50.0, gemm_wave=0.5, gemm_bytes_frac=0.8,
    gemm_bytes_half=1e6, gemm_sharpness=2.0, move_launch_s=4e-6, move_emb=5.0, move_norm=5.0, move_rope=5.0,
    move_act=5.0, move_add=20.0, move_l2=30.0, decode_launch_s=1e-5, decode_bytes_frac=0.8, decode_min_tokens=100.0,
    prefill_launch_s=1e-5, prefill_flops_frac=0.5,
)  # fmt: skip
"""Round numbers, because the package's constants were fitted to both halves."""
DECODE_TOKENS = 128
CONTEXTS = (1024, 2048)
"""Contexts of the composed decode steps; the nearest measured ones of the other half are used."""


class Board:
    """Errors in percent by figure, and by GPU and model."""

    def __init__(self) -> None:
        self.percent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, figure: str, place: str, errors: Sequence[Array]) -> None:
        if sum(map(len, errors)):
            self.percent[figure][place].append(float(100.0 * np.concatenate(errors).mean()))

    def figures(self) -> dict[str, Figure]:
        found = {}
        for figure, places in self.percent.items():
            values = {place: float(np.mean(percent)) for place, percent in places.items()}
            every = {figure: float(np.mean(list(values.values())))}
            every |= {f"{figure}/{place}": value for place, value in sorted(values.items())}
            found |= {name: Figure(value, "%", "lower", GOALS[figure]) for name, value in every.items()}
        return found


def refuse(profiles: Iterable[Profile]) -> tuple[list[Profile], list[str]]:
    """Possible profiles, and the findings of the others."""
    read = list(profiles)
    findings = [finding for each in read if each.gpu is not None for finding in audit(each, load_gpu(each.gpu))]
    bad = {finding.source for finding in findings}
    texts = dict.fromkeys(f"left out: {finding.source}: {finding.text}" for finding in findings)
    return [profile for profile in read if profile.source not in bad], list(texts)


def place_of(profile: Profile) -> str:
    gpu = profile.gpu or "unknown"
    if isinstance(profile, TrainingProfile):
        return f"{gpu}/{profile.model}"
    words = re.split(r"[/_\\]", str(PurePath(profile.source).with_suffix("")))
    drop = {"compute", "mlp", "attention", "linear", "op", "profiling", "data", "vidur", "frontier", "moe", "hf"}
    kept = [word for word in words if word.lower() not in drop and not re.fullmatch(r"(?i)([ahv]\d{2,3}|l40s?)", word)]
    return f"{gpu}/{'_'.join(kept) or profile.source}"


def is_whole(profile: LinearProfile) -> bool:
    """Whether it has all matrix products of a layer."""
    return {curve.operator for curve in profile.curves} >= set(GEMMS)


# ---------------------------------------------------------------- halves


def halves(values: Array) -> list[NDArray[np.bool_]]:
    distinct = np.unique(values)
    return [np.isin(values, distinct[parity::2]) for parity in (0, 1)]


def halves_of_linear(profile: LinearProfile) -> list[LinearProfile]:
    counts = np.unique(np.concatenate([curve.tokens for curve in profile.curves]))
    found = []
    for parity in (0, 1):
        curves = []
        for curve in profile.curves:
            kept = np.isin(curve.tokens, counts[parity::2])
            if kept.sum() >= 2:
                curves.append(replace(curve, tokens=curve.tokens[kept], seconds=curve.seconds[kept]))
        found.append(replace(profile, curves=tuple(curves)))
    return found


def halves_of_attention(profile: AttentionProfile) -> list[AttentionProfile]:
    """By tokens of KV, and without prefills."""
    masks = halves(profile.decode[:, 1])
    return [replace(profile, decode=profile.decode[mask], prefill=profile.prefill[:0]) for mask in masks]


# ---------------------------------------------------------------- steps

LayerSum = tuple[int, Array, Array, Array]
"""Degree, tokens, and predicted and measured seconds of a layer's linear and elementwise operators."""


def layer_sums(gpu: GPU, eff: Efficiencies, profile: LinearProfile, curves: Sequence[RatioCurve]) -> list[LayerSum]:
    """Predicted by rooflines that ``curves`` correct."""
    correction, found = Tables(gpu, eff, tuple(curves)).of(profile.shape), []
    for tp in sorted({curve.tp for curve in profile.curves}):
        measured = [curve for curve in profile.curves if curve.tp == tp and LAYER_COUNTS[curve.operator]]
        if not set(GEMMS) <= {curve.operator for curve in measured}:
            continue  # part of a layer is not a step
        tokens = measured[0].tokens
        for curve in measured[1:]:
            tokens = np.intersect1d(tokens, curve.tokens)
        predicted_s, measured_s = np.zeros(len(tokens)), np.zeros(len(tokens))
        for curve in measured:
            count = LAYER_COUNTS[curve.operator]
            predicted_s += count * operator_s(gpu, eff, profile.shape, tp, curve.operator, tokens, correction)
            measured_s += count * curve.seconds[np.isin(curve.tokens, tokens)]
        found.append((tp, tokens, predicted_s, measured_s))
    return found


def decode_errors(
    gpu: GPU, linear: LinearProfile, attention: AttentionProfile | None, reduces: Sequence[CollectiveProfile]
) -> list[Array]:
    errors = []
    for parity in (0, 1):
        learned, asked = (halves_of_linear(linear)[half] for half in (parity, 1 - parity))
        eff = fit_linear([(gpu, learned)], START)
        sums = layer_sums(gpu, eff, asked, linear_curves(gpu, eff, learned))
        if attention is None:
            errors += [np.abs(p / m - 1.0)[tokens <= DECODE_TOKENS] for _, tokens, p, m in sums]
            continue
        own, other = (halves_of_attention(attention)[half] for half in (parity, 1 - parity))
        eff = fit_attention([(gpu, own)], eff)
        rows = attention_rows(gpu, eff, own, "decode")
        for tp, tokens, predicted, measured in sums:
            reduced = all_reduce_s(reduces, tp, tokens * linear.shape.hidden * 2.0, parity)
            points = decode_points(other, tokens)
            if reduced is None or not len(points):
                continue
            seconds = own.form_s("decode", gpu, eff, points)
            if rows is not None:
                seconds = seconds * np.exp(rows.log_ratio(points[:, 0], points[:, 1]))
            at = np.searchsorted(tokens, points[:, 0])
            ours, theirs = predicted + reduced[0], measured + reduced[1]
            errors.append(np.abs((ours[at] + seconds / tp) / (theirs[at] + points[:, 2] / tp) - 1.0))
    return errors


def decode_points(attention: AttentionProfile, tokens: Array) -> Array:
    points = attention.decode
    if not len(points):
        return points
    lengths = np.unique(points[:, 1])
    wanted = [lengths[np.argmin(np.abs(lengths - context))] for context in CONTEXTS]
    kept = np.isin(points[:, 1], wanted) & np.isin(points[:, 0], tokens) & (points[:, 0] <= DECODE_TOKENS)
    return np.asarray(points[kept])


def all_reduce_s(
    reduces: Sequence[CollectiveProfile], tp: int, num_bytes: Array, parity: int
) -> tuple[Array, Array] | None:
    """Predicted and measured seconds of two all-reduces; None where they were not measured."""
    if tp == 1:
        return np.zeros(len(num_bytes)), np.zeros(len(num_bytes))
    for profile in reduces:
        if profile.workers == profile.workers_per_node == tp and profile.collective == "all_reduce":
            learn = halves(profile.num_bytes)[parity]
            half = replace(profile, num_bytes=profile.num_bytes[learn], seconds=profile.seconds[learn])
            return 2.0 * all_reduce_table(half).seconds(num_bytes), 2.0 * all_reduce_table(profile).seconds(num_bytes)
    return None


# ---------------------------------------------------------------- training


def training_errors(profile: TrainingProfile, seconds: Array) -> list[Array]:
    """Errors of ``seconds`` of passes in chessboard halves of (micro-batch, degree)."""
    sizes, degrees = (np.unique(profile.points[:, i]).tolist() for i in (0, 1))
    colour = np.array([(sizes.index(size) + degrees.index(tp)) % 2 for size, tp in profile.points])
    errors = []
    for learn in (colour == 0, colour == 1):
        if min(learn.sum(), (~learn).sum()) >= 2:
            predict = fit_training(profile.points[learn], seconds[learn])
            predicted = np.array([predict(size, int(tp)) for size, tp in profile.points[~learn]])
            errors.append(np.abs(predicted / seconds[~learn] - 1.0))
    return errors


def fit_training(points: Array, seconds: Array) -> Callable[[float, int], float]:
    """Seconds of a pass by micro-batch and degree: ``fixed + size x (work / tp + link[tp])``, fitted
    to a profile and corrected by its ratios.

    Links are constants per degree, because two GPUs may share a bridge that four do not.
    """
    sizes, tps = points[:, 0], points[:, 1].astype(int)
    degrees = sorted({int(tp) for tp in tps if tp > 1})
    start = [0.1 * seconds.min(), float(np.median(seconds / sizes * tps)) / 2, *[seconds.min() / 4] * len(degrees)]

    def form_s(values: Array, size: Array | float, tp: int) -> Array:
        link_s = values[2 + degrees.index(tp)] if tp in degrees else 0.0
        return np.asarray(values[0] + np.asarray(size, float) * (values[1] / tp + link_s))

    def residuals(values: Array) -> Array:
        return np.log(np.array([form_s(values, size, tp) for size, tp in zip(sizes, tps, strict=True)]) / seconds)

    # A constant that the points do not determine stays where it began.
    fitted, ratios = fit_positive(residuals, np.array(start), tether=0.003), dict[int, tuple[Array, Array]]()
    for tp in set(tps.tolist()):
        here = np.flatnonzero(tps == tp)[np.argsort(sizes[tps == tp])]
        ratios[tp] = np.log(sizes[here]), np.log(seconds[here] / form_s(fitted, sizes[here], tp))

    def predicted_s(size: float, tp: int) -> float:
        ratio = np.exp(np.interp(np.log(size), *ratios[tp])) if tp in ratios else 1.0
        return float(form_s(fitted, size, tp) * ratio)

    return predicted_s


# ---------------------------------------------------------------- the command


def score_steps(profiles: Sequence[Profile], board: Board) -> list[str]:
    def chip(profile: Profile) -> tuple[float, float]:
        gpu = load_gpu(profile.gpu or DEFAULT)
        return gpu.flops_per_s, gpu.memory_bytes_per_s

    notes = []
    attentions = [p for p in profiles if isinstance(p, AttentionProfile) and p.tp == 1]
    reduces = [p for p in profiles if isinstance(p, CollectiveProfile)]
    for linear in (p for p in profiles if isinstance(p, LinearProfile) and is_whole(p)):
        shape = linear.shape
        heads = shape.num_heads, shape.num_kv_heads, shape.hidden
        of_shape = (a for a in attentions if chip(a) == chip(linear) and (a.heads, a.kv_heads, a.shape.hidden) == heads)
        attention = next(of_shape, None)
        if attention is None:
            notes.append(f"decode_mape/{place_of(linear)}: layers without attention, which was not measured")
        own = [r for r in reduces if chip(r) == chip(linear)]
        errors = decode_errors(load_gpu(linear.gpu or DEFAULT), linear, attention, own)
        board.add("decode_mape", place_of(linear), errors)
    return notes


def score_training(profiles: Sequence[Profile], board: Board) -> list[str]:
    notes = []
    for profile in (p for p in profiles if isinstance(p, TrainingProfile)):
        place, distinct = place_of(profile), len(np.unique(profile.points, axis=0))
        if distinct < FEWEST_POINTS:
            notes.append(f"not scored: training of {place}: {distinct} distinct points, fewer than {FEWEST_POINTS}")
            continue
        for part, seconds in (("forward", profile.forward_s), ("backward", profile.backward_s)):
            board.add("training_mape", f"{place}/{part}", training_errors(profile, seconds.sum(axis=1)))
    return notes


def score_transfer(profiles: Sequence[Profile], board: Board) -> None:
    known = [p for p in profiles if isinstance(p, LinearProfile) and p.gpu and is_whole(p)]
    for profile in known:
        gpu = load_gpu(str(profile.gpu))
        rest = [(gpu, other) for other in known if other.gpu == profile.gpu and other.shape != profile.shape]
        if rest:
            eff = fit_linear(rest, START)
            curves = [curve for _, other in rest for curve in linear_curves(gpu, eff, other)]
            errors = [np.abs(p / m - 1.0) for _, _, p, m in layer_sums(gpu, eff, profile, curves)]
            board.add("transfer_model_mape", place_of(profile), errors)


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("cost_model", __doc__)
    parser.add_argument("--data", default=str(EXCERPT), help="directory with profiles; the default is the excerpt")
    options = parser.parse_args(arguments)
    profiles, notes = refuse(read_directory(options.data))
    board = Board()
    notes += score_steps(profiles, board) + score_training(profiles, board)
    score_transfer(profiles, board)
    unknown = sorted({profile.source for profile in profiles if profile.gpu is None})
    notes += [f"GPU unknown, datasheet of {DEFAULT} taken: {source}" for source in unknown]
    print(*notes, sep="\n")
    emit("cost_model", board.figures(), arguments=arguments, as_json=options.json)
