"""Prediction errors of the cost model on kernels, steps and training passes that it has not seen.
No GPU is needed.

``--data DIR`` holds profiles in the layouts of Vidur, Frontier and Sailor, any subset under any
names (a GPU is read from the path); the default is the excerpt in ``benchmarks/data``. Figures are
percent, half -> half on one GPU (`benchmarks.virtual.cost_halves`), with constants fitted to the
half that is learned from:

* ``decode_mape``, ``prefill_mape``: steps. Where attention of a shape was not measured they cover
  the layers without it, as the output notes; ``linear_mape``: those layers of any size.
* ``training_mape``: forward and backward passes of training.
* ``transfer_model_mape``: a model left out, of which the other files of its GPU were seen.

Impossible profiles are left out by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.kernel_profiles import (
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    Profile,
    TrainingProfile,
    read_directory,
)
from benchmarks.kernel_tables import audit, fit_linear, linear_curves
from benchmarks.report import DATA, Figure, command_parser, emit
from benchmarks.virtual.cost_halves import (
    START,
    Score,
    from_curves,
    layer_sums,
    model_label,
    score_composed,
    score_linear,
    score_training,
)  # fmt: skip
from libra.hardware import GPU, load_gpu
from libra.hardware.rooflines import GEMMS

EXCERPT = DATA / "hardware"
GOALS = {
    "decode_mape": 8.0, "prefill_mape": 8.0, "linear_mape": 5.0, "training_mape": 15.0, "transfer_model_mape": 5.0,
}  # fmt: skip
DEFAULT = "A100-80G"
"""The datasheet of a profile whose GPU is unknown."""
FEWEST_POINTS = 10
"""Fewest distinct points of a scored training profile: halves are a chessboard of them."""
UNKNOWN = "unknown"


class Board:
    """Scores by figure, and by figure, GPU and model."""

    def __init__(self) -> None:
        self.scores: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))

    def add(self, figure: str, place: str, score: Score) -> None:
        if len(score.errors):
            self.scores[figure][place].append(score)

    def figures(self) -> dict[str, Figure]:
        found = {}
        for figure, goal in GOALS.items():
            places = self.scores.get(figure)
            if not places:
                continue
            values = {place: float(np.mean([score.mape for score in scores])) for place, scores in places.items()}
            found[figure] = Figure(float(np.mean(list(values.values()))), "%", "lower", goal)
            for place, value in sorted(values.items()):
                found[f"{figure}/{place}"] = Figure(value, "%", "lower", goal)
        return found


def _gpu_of(profile: Profile, unknown: set[str]) -> GPU:
    if profile.gpu is None:
        unknown.add(profile.source)
        return load_gpu(DEFAULT)
    return load_gpu(profile.gpu)


def _place(profile: Profile) -> str:
    gpu = profile.gpu or UNKNOWN
    if isinstance(profile, TrainingProfile):
        return f"{gpu}/{profile.model}"
    return f"{gpu}/{model_label(profile.source)}"


def refuse(profiles: Iterable[Profile]) -> tuple[list[Profile], list[str]]:
    """Possible profiles, and the findings of the others."""
    read = list(profiles)
    findings = [finding for each in read if each.gpu is not None for finding in audit(each, load_gpu(each.gpu))]
    bad = {finding.source for finding in findings}
    texts = dict.fromkeys(f"left out: {finding.source}: {finding.text}" for finding in findings)
    return [profile for profile in read if profile.source not in bad], list(texts)


def _score_halves(profiles: Sequence[Profile], board: Board, unknown: set[str]) -> list[str]:
    notes = []
    for profile in profiles:
        gpu, place = _gpu_of(profile, unknown), _place(profile)
        if isinstance(profile, LinearProfile):
            for score in score_linear(gpu, profile):
                board.add({"": "linear_mape"}.get(score.label, f"linear_{score.label}"), place, score)
        elif isinstance(profile, TrainingProfile):
            distinct = len(np.unique(profile.points, axis=0))
            if distinct < FEWEST_POINTS:
                notes.append(f"not scored: training of {place}: {distinct} distinct points, fewer than {FEWEST_POINTS}")
                continue
            scores, constants = score_training(profile)
            notes.append(f"training of {place}: {constants} constants per pass beside the points of the other half")
            for part, score in scores.items():
                board.add("training_mape", f"{place}/{part}", score)
    return notes


def _same_chip(one: GPU, other: GPU) -> bool:
    return (one.flops_per_s, one.memory_bytes_per_s) == (other.flops_per_s, other.memory_bytes_per_s)


def _score_steps(profiles: Sequence[Profile], board: Board, unknown: set[str]) -> list[str]:
    notes = []
    attentions = [p for p in profiles if isinstance(p, AttentionProfile) and p.tp == 1]
    reduces = [p for p in profiles if isinstance(p, CollectiveProfile)]
    for linear in (p for p in profiles if isinstance(p, LinearProfile)):
        gpu, place = _gpu_of(linear, unknown), _place(linear)
        shape = linear.shape
        of_shape = [
            a
            for a in attentions
            if _same_chip(_gpu_of(a, unknown), gpu)
            and (a.heads, a.kv_heads, a.shape.hidden) == (shape.num_heads, shape.num_kv_heads, shape.hidden)
        ]
        own = [r for r in reduces if _same_chip(_gpu_of(r, unknown), gpu)]
        full = {c.operator for c in linear.curves} >= set(GEMMS)
        if full and of_shape:
            scores = score_composed(gpu, linear, of_shape[0], own)
            for kind in ("decode", "prefill"):
                if kind in scores:
                    board.add(f"{kind}_mape", place, scores[kind])
        elif full:
            notes.append(
                f"decode_mape/{place} and prefill_mape/{place}: layers without attention, which was not measured"
            )
            for kind in ("decode", "prefill"):
                for score in board.scores[f"linear_{kind}"].get(place, []):
                    board.add(f"{kind}_mape", place, score)
    return notes


def _score_transfer(profiles: Sequence[Profile], board: Board) -> None:
    known: dict[str, list[LinearProfile]] = defaultdict(list)
    for profile in profiles:
        if isinstance(profile, LinearProfile) and profile.gpu and {c.operator for c in profile.curves} >= set(GEMMS):
            known[profile.gpu].append(profile)
    for name, files in known.items():
        gpu = load_gpu(name)
        for profile in files:
            rest = [other for other in files if other.shape != profile.shape]
            if not rest:
                continue
            eff = fit_linear([(gpu, other) for other in rest], START)
            curves = tuple(curve for other in rest for curve in linear_curves(gpu, eff, other))
            sums = layer_sums(profile, from_curves(gpu, eff, profile, curves))
            errors = np.concatenate([np.abs(p / m - 1.0) for _, _, p, m in sums])
            board.add("transfer_model_mape", _place(profile), Score("transfer", errors))


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("cost_model", __doc__)
    parser.add_argument("--data", default=str(EXCERPT), help="directory with profiles; the default is the excerpt")
    options = parser.parse_args(arguments)
    profiles, refused = refuse(read_directory(options.data))
    board, unknown = Board(), set[str]()
    notes = _score_halves(profiles, board, unknown)
    notes += _score_steps(profiles, board, unknown)
    _score_transfer(profiles, board)
    notes += [f"GPU unknown, datasheet of {DEFAULT} taken: {source}" for source in sorted(unknown)]
    print(*refused, *notes, sep="\n")
    emit("cost_model", board.figures(), arguments=arguments, as_json=options.json)
