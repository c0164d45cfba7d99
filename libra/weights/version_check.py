"""The comparisons by which an engine proves that it holds a published version.

The trainer writes a `VersionCheck` beside the weights. A `ProbeCalibration` is the difference
between trainer and engine at equal weights, measured at version 0. Three comparisons are made:

- columns, bit for bit with the file, where it differs from the engine's earlier versions and at
  random: detects one bit in a column read;
- `libra.projections`, against the trainer's tensors: detects a change of a layer of
  `PROJECTION_POWER` times the tolerance, in root mean square;
- the probe, log-probabilities of fixed tokens, against the trainer's: detects the tolerance, in
  nats.

Invariants
1. A version passes only if all comparisons that could be made agree; the verdict names the
   comparison that detects a stale layer.
2. An answer that is missing or not finite disagrees.
3. Two engines with the same answers get the same verdict.
4. If any bit of a matrix differs, at least one changed column is found (a changed row for an
   embedding). Reading stops at the first block of rows that differs, so comparing consecutive
   versions reads a small part of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from libra.errors import WeightsError
from libra.projections import is_embedding
from libra.seals import sealed_text, unseal

SCHEMA = 1
NOISE_FACTOR = 4.0
"""A tolerance is this many times the difference measured at version 0."""
NARROW = ("bfloat16", "float16")
"""Types of which a probe's mean difference is compared."""
PROBE_FLOOR_EPS = 32.0
"""A tolerance of log-probabilities is at least this many rounding units of the type served: of 1 in narrow types, else of the
probe's least likely token, whose rounding is in proportion to its size, at the version that is checked."""
PROBE_CAP_NATS = {"float32": 1e-2, "bfloat16": 1.0, "float64": 1e-6}
"""A larger difference at version 0 is not noise: the engine does not compute the trainer's model."""
PROJECTION_CAP_FRAC = 0.05
"""The same for projections, relative to their root mean square."""
PROJECTION_POWER = 2.0
"""A change of this many tolerances leaves all eight numbers within it with a probability of 4e-4."""
POWERFUL = 3.0
"""A probe distinguishes two versions if the median change of its log-probabilities is above this many tolerances."""

Logps = tuple[tuple[float, ...], ...]


class VersionCheck(msgspec.Struct, frozen=True):
    """The numbers that the trainer computed for a version."""

    version: int
    digest: str  # digest of the tensors, as in the registry
    dtype: str  # dtype of matrices: "float32", "bfloat16"
    seed: int  # of the projections
    projections: dict[str, tuple[float, ...]]  # by weight; tied weights under each name
    probe: tuple[tuple[int, ...], ...] = ()  # token ids of each probe
    logp: Logps = ()  # the trainer's, from the second token on, in nats
    previous_logp: Logps | None = None  # under the previous version, if known
    first_logp: Logps | None = None  # under version 0, if known

    @property
    def moved_nats(self) -> float | None:
        """Median |logp_v - logp_(v-1)| over the probe; None if the previous version is unknown."""
        if self.previous_logp is None or not self.logp:
            return None
        return float(np.median(np.abs(_flat(self.logp) - _flat(self.previous_logp))))

    def to_json(self) -> str:
        return sealed_text({"schema": SCHEMA, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: str, where: object) -> VersionCheck:
        """The check in a file's text. Raises WeightsError naming ``where`` if it is not a check."""
        try:
            values = unseal(text)
            if values.get("schema") != SCHEMA:
                raise ValueError("unknown schema")
            return msgspec.convert(values, cls)
        except ValueError as fault:  # and msgspec.ValidationError
            raise WeightsError(
                f"weights: {where} is not the check of a version ({fault}); publish the version again"
            ) from fault


@dataclass(frozen=True, slots=True)
class Answers:
    """An engine's answers: (T - 1,) numbers per probe, 8 per layer, and the requested columns."""

    logp: tuple[NDArray[np.float32], ...]
    projections: Mapping[str, tuple[float, ...]]
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpectedProbes:
    """Columns of a version's file, and the number of matrices with a changed column, if known."""

    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    num_changed: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeCalibration:
    """Allowed differences between trainer and engine at equal weights."""

    probe_nats: float  # |log p| difference of each token, in bfloat16 of their mean
    projection_frac: float  # largest difference of a layer's numbers, relative to their root mean square
    measured: bool  # whether version 0 was compared; else both are the caps, which detect little


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The outcome of a check, and what it could have detected."""

    passed: bool
    method: str  # comparison that tells this version from the one before, or the one that failed
    layer: str  # weight that disagrees; "(all)" if only log-probabilities do; empty if none
    gap: float  # of ``method``, in nats or as a fraction of a layer's root mean square
    tolerance: float  # in the same unit
    moved_nats: float | None  # `VersionCheck.moved_nats`
    num_layers: int  # number compared
    num_changed: int | None  # layers of which a changed column was read, if known
    smallest_change: float  # detectable in one layer: 0 for columns (one bit), else relative or nats
    detail: str


def uncalibrated(dtype: str) -> ProbeCalibration:
    """Tolerances if version 0 could not be compared."""
    return ProbeCalibration(PROBE_CAP_NATS.get(dtype, 1.0), PROJECTION_CAP_FRAC, measured=False)


def calibrate(check: VersionCheck, answers: Answers) -> ProbeCalibration:
    """Tolerances from an engine's answers at the version of ``check``.

    Four times the measured difference, but at least what rounding can cause for other tokens:
    `PROBE_FLOOR_EPS` for a log-probability; for a projection 4 units of the type and 4 sqrt(2048)
    of float32, in which a layer sums. Caps keep an engine with wrong weights from passing as a
    noisy one.
    """
    eps, single = _eps(check.dtype), _eps("float32")
    gap_nats = _probe_gap(check, answers.logp)
    shared = check.projections.keys() & answers.projections.keys()
    gap_frac = max((_projection_gap(check.projections[n], answers.projections[n]) for n in shared), default=0.0)
    cap = uncalibrated(check.dtype)
    floor_frac = 4 * eps + 4 * single * math.sqrt(2048)
    return ProbeCalibration(
        max(min(NOISE_FACTOR * gap_nats, cap.probe_nats), _least_nats(check)),
        min(max(NOISE_FACTOR * gap_frac, floor_frac), cap.projection_frac),
        measured=math.isfinite(gap_nats) and math.isfinite(gap_frac),
    )


def _eps(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).eps)


def _least_nats(check: VersionCheck) -> float:
    """Largest change of a probe log-probability by rounding, in nats; at most the cap."""
    size = 1.0 if check.dtype in NARROW or not check.logp else max(1.0, float(np.abs(_flat(check.logp)).max()))
    return min(PROBE_FLOOR_EPS * _eps(check.dtype) * size, uncalibrated(check.dtype).probe_nats)


def as_first(check: VersionCheck) -> VersionCheck | None:
    """``check`` restricted to version 0, to calibrate an engine at version 0; None if unknown."""
    if check.first_logp is None:
        return None
    return VersionCheck(0, "", check.dtype, check.seed, {}, check.probe, check.first_logp)


def judge(
    check: VersionCheck, expected: ExpectedProbes, answers: Answers, calibration: ProbeCalibration
) -> CheckVerdict:
    """Whether an engine holds the version of ``check``, and what this comparison could detect."""
    differ = _differing_columns(expected, answers)
    gaps = {name: _projection_gap(want, answers.projections.get(name)) for name, want in check.projections.items()}
    worst, gap_frac = max(gaps.items(), key=lambda item: item[1], default=("", 0.0))
    gap_nats, moved = _probe_gap(check, answers.logp), check.moved_nats
    nats, frac = max(calibration.probe_nats, _least_nats(check)), calibration.projection_frac

    def verdict(passed: bool, method: str, layer: str, gap: float, detail: str) -> CheckVerdict:
        tolerance = {"columns": 0.0, "probe": nats, "projections": frac}[method]
        smallest = PROJECTION_POWER * frac if method == "projections" else tolerance
        return CheckVerdict(
            passed, method, layer, gap, tolerance, moved, len(check.projections), expected.num_changed, smallest, detail
        )

    if differ:
        layer, gap = max(differ.items(), key=lambda item: item[1])
        detail = f"{len(differ)} tensors differ from the file's; {layer} by {gap:.3g}, and bits are compared"
        return verdict(False, "columns", layer, gap, detail)
    if not gap_frac <= frac:
        detail = (
            f"projections of {worst} are {gap_frac:.3g} of their size off the trainer's; the tolerance is {frac:.3g}"
        )
        return verdict(False, "projections", worst, gap_frac, detail)
    if not gap_nats <= nats:
        detail = (
            f"log-probabilities of the probe are {gap_nats:.3g} nats off the trainer's; the tolerance is {nats:.3g}"
        )
        return verdict(False, "probe", "(all)", gap_nats, detail)
    detail = (
        f"probe {gap_nats:.3g} of {nats:.3g} nats, moved {'unknown' if moved is None else f'{moved:.3g}'}; projections "
        f"{gap_frac:.3g} of {frac:.3g}; {len(expected.columns)} tensors bit for bit"
    )
    if expected.columns and expected.num_changed is not None:
        return verdict(True, "columns", "", 0.0, detail)
    if moved is not None and moved > POWERFUL * nats:
        return verdict(True, "probe", "", gap_nats, detail)
    return verdict(True, "projections", "", gap_frac, detail)


def _flat(rows: Logps | tuple[NDArray[np.float32], ...]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(row, np.float64) for row in rows])


def _finite(gap: float) -> float:
    return gap if math.isfinite(gap) else math.inf


def _probe_gap(check: VersionCheck, got: tuple[NDArray[np.float32], ...]) -> float:
    """Difference in nats; 0 without a probe, infinite if shapes or numbers are wrong.

    The maximum, but the mean for narrow types, in which a single unlikely token differs by one or
    two nats between two correct passes.
    """
    if not check.logp:
        return 0.0
    if [len(row) for row in check.logp] != [len(row) for row in got]:
        return math.inf
    gaps = np.abs(_flat(check.logp) - _flat(got))
    return _finite(float(gaps.mean() if check.dtype in NARROW else gaps.max()))


def _projection_gap(expected: tuple[float, ...], got: tuple[float, ...] | None) -> float:
    if got is None or len(got) != len(expected):
        return math.inf
    size = math.sqrt(sum(number * number for number in expected) / len(expected))
    gap = _finite(float(np.abs(np.subtract(expected, got)).max()))
    return gap / size if size else (0.0 if gap == 0 else math.inf)


def _differing_columns(expected: ExpectedProbes, answers: Answers) -> dict[str, float]:
    """Per differing tensor, its largest difference; infinite if an answer is missing."""
    found = {}
    for name, want in expected.columns.items():
        got = answers.columns.get(name)
        if got is None or got.shape != want.shape:
            found[name] = math.inf
        elif not np.array_equal(got, want):
            found[name] = _finite(float(np.abs(got.astype(np.float64) - want).max()))
    return found


# -- columns in which two versions differ --------------------------------------------------------

FIRST_ELEMENTS, BLOCK_ELEMENTS = 2**12, 2**18
"""Elements compared first, in most versions enough, and at most at once."""
COLUMNS = 2
"""Number of changed columns requested of a matrix, and of random ones."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_columns(before: Tensor, after: Tensor, *, rows: bool = False) -> list[int]:
    """Differing columns (or ``rows``) of the first block that has any; empty if all are equal."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return list(range(min(after.shape[0 if rows else 1], 64)))
    bits = _BITS[after.element_size()]
    begin, size = 0, FIRST_ELEMENTS
    while begin < after.shape[0]:
        end = begin + max(1, size // after.shape[1])
        differs = (before[begin:end].view(bits) != after[begin:end].view(bits)).any(1 if rows else 0)
        if bool(differs.any()):
            return (torch.nonzero(differs)[:, 0] + (begin if rows else 0)).tolist()
        begin, size = end, min(4 * size, BLOCK_ELEMENTS)
    return []


def expected_columns(
    path: Path, before: list[Path], tied: Mapping[str, str], dtype: torch.dtype, seed: int
) -> tuple[dict[str, tuple[int, ...]], ExpectedProbes]:
    """The columns to request from an engine that loads ``path``, and their expected values.

    The engine may hold any of ``before`` instead; missing files there are skipped. ``tied`` maps
    aliases to names in the file. Norms and biases are requested whole; of a matrix up to `COLUMNS`
    places that differ from each of ``before`` and as many random ones. Raises WeightsError if
    ``path`` is unreadable.
    """
    rng = np.random.default_rng(seed)
    wanted: dict[str, tuple[int, ...]] = {}
    columns: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    num_changed = 0
    try:
        with safe_open(path, framework="pt") as file:
            older = [held for held in map(_opened, before) if held is not None]
            names = {name: name for name in file.keys()} | dict(tied)  # noqa: SIM118  a safe_open has no __iter__
            for name, stored in names.items():
                tensor = file.get_tensor(stored)
                if tensor.ndim == 1:
                    wanted[name], columns[name] = (), tensor.to(dtype).float().numpy()[None]
                elif tensor.ndim == 2 and name.endswith(".weight"):
                    rows = is_embedding(name)
                    places = [int(place) for place in rng.integers(0, tensor.shape[0 if rows else 1], COLUMNS)]
                    changed = False
                    for held in older:
                        differing = changed_columns(held.get_tensor(stored), tensor, rows=rows)
                        changed |= bool(differing)
                        places += rng.permutation(differing)[:COLUMNS].tolist() if differing else []
                    num_changed += changed
                    wanted[name] = tuple(places)
                    columns[name] = (tensor[places] if rows else tensor[:, places].T).to(dtype).float().numpy()
    except (OSError, SafetensorError) as fault:
        raise WeightsError(f"weights: {path} is torn or not readable ({fault})") from fault
    return wanted, ExpectedProbes(columns, num_changed if older else None)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError):
        return None
