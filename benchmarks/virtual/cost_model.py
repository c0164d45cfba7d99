"""Prediction errors of the cost model on kernels, steps and training passes that it has not seen.
No GPU is needed.

``--data DIR`` holds profiles in the layouts of Vidur, Frontier and Sailor, any subset under any
names (a GPU is read from the path); the default is the excerpt in ``benchmarks/data``. All
``*_mape`` are percent, half -> half on one GPU (`benchmarks.virtual.cost_halves`), but
``transfer_gpu_mape``: a GPU of which only the datasheet is known, with constants that saw the A100
files of the package only; and ``transfer_model_mape``: a model left out, of which the other files
of its GPU were seen. Where attention of a shape was not measured, ``decode_mape`` and
``prefill_mape`` cover the layers without it, as the output notes. Impossible profiles are
left out by name. Constants of a half are fitted to the half that is learned from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

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
    score_attention,
    score_collective,
    score_composed,
    score_linear,
    score_training,
)  # fmt: skip
from libra.hardware import GPU, Efficiencies, load_gpu
from libra.hardware.layer_seconds import GEMMS

EXCERPT = DATA / "hardware"
GOALS = {
    "decode_mape": 8.0, "prefill_mape": 8.0, "linear_mape": 5.0, "attention_decode_mape": 10.0,
    "attention_prefill_mape": 15.0, "allreduce_mape": 8.0, "training_mape": 15.0, "transfer_gpu_mape": 10.0,
    "transfer_model_mape": 5.0,
}  # fmt: skip
FITTED_ON = "A100-80G"
"""The GPU to whose files the package's constants were fitted."""
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
        return load_gpu(FITTED_ON)
    return load_gpu(profile.gpu)


def _place(profile: Profile) -> str:
    gpu = profile.gpu or UNKNOWN
    if isinstance(profile, TrainingProfile):
        return f"{gpu}/{profile.model}"
    return f"{gpu}/{model_label(profile.source)}"


def refuse(profiles: Iterable[Profile]) -> tuple[list[Profile], list[str]]:
    """Possible profiles, and the findings of the others.

    A file that was measured on another GPU is scored as that one's: halves of it say nothing false.
    """
    read = list(profiles)
    texts: list[str] = []
    bad: set[str] = set()
    renamed: dict[str, str] = {}
    for profile in read:
        for finding in audit(profile, load_gpu(profile.gpu)) if profile.gpu is not None else []:
            if finding.measured_on is not None:
                renamed[profile.source] = finding.measured_on
                texts.append(f"scored as {finding.measured_on}: {profile.source}: {finding.text}")
            else:
                bad.add(profile.source)
                texts.append(f"left out: {profile.source}: {finding.text}")
    kept = [
        replace(profile, gpu=renamed[profile.source]) if profile.source in renamed else profile
        for profile in read
        if profile.source in renamed or profile.source not in bad
    ]
    return kept, list(dict.fromkeys(texts))


def _score_halves(profiles: Sequence[Profile], board: Board, unknown: set[str]) -> list[str]:
    notes = []
    for profile in profiles:
        gpu, place = _gpu_of(profile, unknown), _place(profile)
        if isinstance(profile, LinearProfile):
            for score in score_linear(gpu, profile):
                board.add({"": "linear_mape"}.get(score.label, f"linear_{score.label}"), place, score)
        elif isinstance(profile, AttentionProfile):
            for part, score in score_attention(gpu, profile).items():
                board.add(f"attention_{part}_mape", f"{place}/tp{profile.tp}", score)
        elif isinstance(profile, CollectiveProfile) and profile.collective == "all_reduce":
            board.add(
                "allreduce_mape", f"{place}/{profile.workers}x{profile.workers_per_node}", score_collective(profile)
            )
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


def _score_transfer(profiles: Sequence[Profile], board: Board) -> list[str]:
    notes = []
    known: dict[str, list[LinearProfile]] = defaultdict(list)
    for profile in profiles:
        if isinstance(profile, LinearProfile) and profile.gpu and {c.operator for c in profile.curves} >= set(GEMMS):
            known[profile.gpu].append(profile)
    for name, files in known.items():
        gpu = load_gpu(name)
        if name != FITTED_ON:
            for profile in files:
                sums = layer_sums(profile, from_curves(gpu, Efficiencies(), profile, ()))
                errors = np.concatenate([np.abs(p / m - 1.0) for _, _, p, m in sums])
                board.add("transfer_gpu_mape", _place(profile), Score("transfer", errors))
            if _same_chip(gpu, load_gpu(FITTED_ON)):
                notes.append(
                    f"transfer_gpu_mape of {name}: the same chip as {FITTED_ON}; it says little of other chips"
                )
        for profile in files:
            rest = [other for other in files if other.shape != profile.shape]
            if not rest:
                continue
            eff = fit_linear([(gpu, other) for other in rest], START)
            curves = tuple(curve for other in rest for curve in linear_curves(gpu, eff, other))
            sums = layer_sums(profile, from_curves(gpu, eff, profile, curves))
            errors = np.concatenate([np.abs(p / m - 1.0) for _, _, p, m in sums])
            board.add("transfer_model_mape", _place(profile), Score("transfer", errors))
    return notes


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("cost_model", __doc__)
    parser.add_argument("--data", default=str(EXCERPT), help="directory with profiles; the default is the excerpt")
    options = parser.parse_args(arguments)
    profiles, refused = refuse(read_directory(options.data))
    board, unknown = Board(), set[str]()
    notes = _score_halves(profiles, board, unknown)
    notes += _score_steps(profiles, board, unknown)
    notes += _score_transfer(profiles, board)
    notes += [f"GPU unknown, datasheet of {FITTED_ON} taken: {source}" for source in sorted(unknown)]
    print(*refused, *notes, sep="\n")
    emit("cost_model", board.figures(), arguments=arguments, as_json=options.json)
