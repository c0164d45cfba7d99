"""The report of a training step as flat numbers, the sums behind it, and the step's peak memory.

On a GPU the peak is torch's ``max_memory_allocated``. On a CPU it is the process's resident memory
(Linux: ``VmHWM``, reset before the step) less the resident memory before the model was loaded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step. Every field is JSON; means are over the action tokens forwarded."""

    step: int  # 0-based; the step turned weights ``step`` into ``step + 1``
    digest: str  # of the new weights (`libra.tensors.digest`); empty if computed as they are published
    loss: float = 0.0  # as aggregated, with KL term and entropy bonus; mean over optimizer steps
    grad_norm: float = 0.0  # 2-norm before clipping; mean over optimizer steps
    lr: float = 0.0
    optimizer_steps: int = 0  # 0 if nothing had an advantage: then the weights do not change
    sequences: int = 0  # trajectories that may train; with ``action_tokens`` the denominators of the loss
    excluded_sequences: int = 0  # trajectories of a failure class that does not train
    action_tokens: int = 0  # generated tokens of ``sequences``
    forwarded_sequences: int = 0  # over all passes; if kl_coef=0, trajectories without advantage need no pass
    forwarded_tokens: int = 0  # inputs of the model over all passes
    rows: int = 0
    micro_batches: int = 0
    packing_efficiency_frac: float = 0.0  # real tokens over places computed
    ratio_mean: float = 0.0  # p_now / p_old, over the tokens forwarded
    ratio_max: float = 0.0
    clip_low_frac: float = 0.0  # tokens clipped below, with a negative advantage
    clip_high_frac: float = 0.0  # tokens clipped above, with a positive advantage
    kl_behaviour: float = 0.0  # from the old policy, nats
    kl_reference: float = 0.0  # nats; with ``trainer.kl_args.in_reward`` of the engine's log-probabilities
    entropy: float = 0.0  # nats
    mismatch_tokens: int = 0  # `libra.train.mismatch`; without any token the figures are None
    mismatch_mean_abs: float | None = None  # nats
    mismatch_max_abs: float | None = None  # nats
    pack_s: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0
    total_s: float = 0.0  # wall seconds, including work that no other field counts
    tokens_per_s: float = 0.0  # forwarded tokens over total_s
    correction_frac: float = 0.0  # tokens whose importance weight was truncated or masked
    effective_sample_frac: float = 1.0  # effective sample size of the weights, masks included, over tokens
    exact_old_frac: float = 0.0  # tokens with the trainer's own old log-probability, under their weights
    mismatch_k3: float | None = None  # nats
    mismatch_effective_frac: float | None = None  # effective sample size over tokens
    replicas: int = 1  # core replicas; maximum over optimizer steps, as the next two fields
    hybrids: int = 0  # hybrids that computed a slice
    hybrids_joining: int = 0  # hybrids that had no weights yet
    hybrids_lost: int = 0  # hybrids whose slice the core computed
    reduce_s: float = 0.0  # seconds of the reduction over the core
    reduce_bytes: int = 0  # on each replica of the core
    hybrid_wait_s: float = 0.0  # seconds that the core waited, after its own slices
    hybrid_copy_s: float = 0.0  # copying stepped weights for hybrids
    hybrid_blocked_s: float = 0.0  # wait before the step, until a copy for a joining hybrid stopped
    hybrid_sent_bytes: int = 0  # weights and slices
    hybrid_received_bytes: int = 0  # gradients
    peak_bytes: int = 0  # of the first core replica's process; 0 if the system does not report it
    rejected_frac: float = 0.0  # tokens that a mask left out of the loss
    old_logp_s: float = 0.0  # passes for old log-probabilities
    kl_coef: float = 0.0  # coefficient of the KL term or penalty
    expert_load_ratio: float = 0.0  # busiest expert's tokens over the mean of all; 0: no routes
    routes_replayed_frac: float = 0.0  # share of tokens and layers
    routes_equal_frac: float = 0.0  # share of replayed routes that the trainer would have chosen, too
    mismatch_parts: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine and length class
    mismatch_worst: list[dict[str, Any]] = field(default_factory=list)  # tokens with the largest gaps
    kl_teacher: float = 0.0  # divergence over the tokens that the teacher scored, nats
    taught_frac: float = 0.0  # share of tokens that the teacher scored
    top_k_teacher_frac: float = 0.0  # teacher's probability of its top-k tokens; 0 without top-k
    top_k_student_frac: float = 0.0  # student's probability of the same tokens
    publish_wait_s: float = 0.0  # seconds until earlier weights were published

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_COUNTS = {each.name for each in fields(StepReport) if each.type == "int"}
_MOST = ("replicas", "hybrids", "hybrids_joining", "peak_bytes")
_MEANS = {
    "loss": ("loss", "minibatches"), "grad_norm": ("grad_norm", "optimizer_steps"),
    "packing_efficiency_frac": ("forwarded_tokens", "places"), "ratio_mean": ("ratio_sum", "scored"),
    "clip_low_frac": ("clipped_low", "scored"), "clip_high_frac": ("clipped_high", "scored"),
    "kl_behaviour": ("kl_sum", "scored"), "entropy": ("entropy", "scored"),
    "kl_teacher": ("kl_teacher", "taught"), "taught_frac": ("taught", "scored"),
    "top_k_teacher_frac": ("top_k_teacher", "taught"), "top_k_student_frac": ("top_k_student", "taught"),
    "correction_frac": ("corrected", "scored"), "rejected_frac": ("rejected", "scored"),
    "exact_old_frac": ("exact_old", "scored"), "expert_load_ratio": ("expert_ratio", "expert_batches"),
    "routes_replayed_frac": ("routed_places", "layer_places"), "routes_equal_frac": ("equal_places", "routed_places"),
}  # fmt: skip
"""Fields that are one sum over another."""


@dataclass(slots=True)
class Tally:
    """Sums and maxima collected during one step, from which the report is made."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    stepped: bool = False
    """Whether the weights have changed since the step began."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """Tokens with the largest gaps between engine and trainer."""

    def part(self) -> Tally:
        """An empty tally for one slice of a minibatch."""
        return Tally(stepped=self.stepped)

    def take(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        """Add another replica's tally, without seconds (``_s``), because replicas run at once."""
        self.add(**{name: amount for name, amount in sums.items() if not name.endswith("_s")})
        self.at_least(**maxima)

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def at_least(self, **values: float) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)

    def mean(self, name: str, count: str) -> float:
        """One sum over another, 0 if nothing was counted."""
        total = self.sums.get(count, 0.0)
        return self.sums.get(name, 0.0) / total if total else 0.0

    def _effective_frac(self, total: str, square: str, count: str) -> float:
        squares = self.sums.get(square, 0.0) * self.sums.get(count, 0.0)
        return self.sums[total] ** 2 / squares if squares else 1.0

    def mismatch(self) -> dict[str, float | None]:
        """The figures of `libra.train.mismatch`; None if no token was compared."""
        found = {
            "mismatch_mean_abs": self.mean("mismatch_sum", "mismatch_tokens"),
            "mismatch_max_abs": self.maxima.get("mismatch"),
            "mismatch_k3": self.mean("mismatch_k3", "mismatch_tokens"),
            "mismatch_effective_frac": self._effective_frac(
                "mismatch_weight", "mismatch_weight_square", "mismatch_tokens"
            ),
        }
        return found if self.sums.get("mismatch_tokens") else dict.fromkeys(found)

    def report(self, *, step: int, digest: str, lr: float, total_s: float) -> StepReport:
        """The report of the step; a sum with the name of a field becomes that field."""
        same = {f.name: self.sums[f.name] for f in fields(StepReport) if f.name in self.sums}
        same = {name: int(value) if name in _COUNTS else value for name, value in same.items()}
        most = {name: int(self.maxima[name]) for name in _MOST if name in self.maxima}
        found: dict[str, Any] = {
            **{name: self.mean(total, count) for name, (total, count) in _MEANS.items()},
            **self.mismatch(),
            "ratio_max": self.maxima.get("ratio_max", 0.0),
            "kl_reference": self.mean("kl_reference", "scored") or self.mean("kl_reward", "kl_reward_tokens"),
            "effective_sample_frac": self._effective_frac("weight_sum", "weight_square_sum", "scored"),
            "tokens_per_s": self.sums.get("forwarded_tokens", 0.0) / total_s if total_s > 0 else 0.0,
        }
        values: dict[str, Any] = {**same, **most, **found}
        return StepReport(step=step, digest=digest, lr=lr, total_s=total_s, **values)


MAPPED_FROM_BYTES = 2**18
"""Size from which tensors are mapped separately, if a CPU trains a large model."""
LARGE_MODEL_BYTES = 2**26
"""Bytes of weights of a large model; mapping slows smaller models down."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@cache
def map_large_tensors() -> bool:
    """Make glibc map large tensors separately, so that their memory is returned; False without
    glibc. By default tensors of up to 32 MB share one heap and fragment it."""
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, MAPPED_FROM_BYTES))


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def _trim() -> None:
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def resident_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process, now or (``VmHWM``) at its peak; 0 if unknown."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class StepMemory:
    """Peak memory of this process in a step, above its memory when this object was created.
    ``device`` is the device of the model, which is loaded later."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        _trim()  # free memory in the heap does not count
        self.before_bytes = 0 if self.device.type == "cuda" else resident_bytes()
        self._watching = self._maps = False

    def model_loaded(self, num_bytes: int) -> None:
        """With a large model on a CPU, return freed memory to the system from now on."""
        if self.device.type == "cpu" and num_bytes >= LARGE_MODEL_BYTES:
            self._maps = map_large_tensors()

    def start(self) -> None:
        """Reset the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        if self._maps:
            _trim()
        self._watching = False
        with suppress(OSError):  # not Linux, or without the permission
            _CLEAR.write_text("5")
            self._watching = True

    def peak_bytes(self) -> int:
        """The peak since `start`; 0 if the system does not report it."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(resident_bytes("VmHWM") - self.before_bytes, 0) if self._watching else 0
