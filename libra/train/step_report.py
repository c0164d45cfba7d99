"""The report of a training step as flat numbers, the sums it is computed from, and the peak memory of a step.

On a GPU the peak is torch's own (``max_memory_allocated``). On a CPU it is the process's resident memory (Linux:
``VmHWM``, set back before the step) less what was resident before the model was loaded.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step. Every field is JSON; means are over the action tokens forwarded.

    Attributes
    ----------
    step : int
        0-based; the step turned weights ``step`` into weights ``step + 1``.
    digest : str
        Content hash of the weights after the step (`libra.tensors.digest`); empty if it is computed as they are published.
    loss, grad_norm, lr
        Loss with KL term and entropy bonus, aggregated as configured; 2-norm of the gradient before clipping; means over
        optimizer steps.
    optimizer_steps : int
        0 if nothing had an advantage: then the weights stay as they are.
    sequences, action_tokens : int
        Trajectories that may train, and their generated tokens: the denominators of the loss.
    excluded_sequences : int
        Trajectories of a failure class that does not train.
    forwarded_sequences, forwarded_tokens, rows, micro_batches : int
        Input of the model over all passes; sequences without advantage need no forward pass if kl_coef=0.
    packing_efficiency_frac : float
        Real tokens over places computed (1: no padding).
    ratio_mean, ratio_max, clip_low_frac, clip_high_frac, kl_behaviour, kl_reference, entropy
        Statistics of p_now / p_old as the loss uses it, the two clipped shares, divergences and entropy in nats.
    mismatch_tokens, mismatch_mean_abs, mismatch_max_abs, mismatch_k3, mismatch_effective_frac
        For tokens whose weights and KV cache are of the version being trained, before the first optimizer step
        (`libra.train.mismatch`): |log p_rollout - log p_trainer|, k3 of rollout against trainer in nats, and the effective
        sample size of p_trainer / p_rollout over the number of tokens; None where there are none.
    mismatch_parts : dict
        tokens, mean_abs, k3 and max_abs of the same by engine and by length class (`libra.train.mismatch`).
    mismatch_worst : list of dict
        The tokens with the largest gaps: trajectory, token (position), token_id, engine, and both log-probabilities (rollout,
        trainer).
    pack_s, forward_backward_s, optimizer_s, total_s, tokens_per_s
        Wall seconds, the total with what is not in the others; forwarded tokens over total_s.
    expert_load_ratio : float
        Mean over micro-batches and layers of the busiest expert's tokens over the mean of all experts, by recorded routes; 0: none.
    routes_replayed_frac, routes_equal_frac : float
        Share of tokens and layers whose experts were replayed; share of those for which the trainer's router had chosen the same.
    kl_coef : float
        Coefficient of the KL term or penalty in this step. With ``trainer.kl_in_reward``, ``kl_reference`` is of the engine's
        log-probabilities and the mean over all generated tokens.
    correction_frac, rejected_frac, effective_sample_frac, exact_old_frac : float
        Share of tokens whose importance weight was truncated or masked; share that a mask left out of the loss
        (``trainer.reject``, ``off_policy_threshold``, ``m2po_threshold``); effective sample size of the weights, masks
        included, over the number of tokens (1: all weigh the same); share of tokens whose old log-probability is the
        trainer's own, under the weights that generated them.
    kl_teacher, taught_frac : float
        Divergence from the teacher (`distil.divergence`; with a top-k of K + 1 outcomes), a mean over tokens that it scored; their
        share.
    top_k_teacher_frac, top_k_student_frac : float
        Probability that teacher and student give to the teacher's top-k, means over those tokens; 0 without a top-k.
    old_logp_s : float
        Seconds of the passes before the step for old log-probabilities (``trainer.old_logp``).
    publish_wait_s : float
        Seconds for which the step waited, its gradient complete, until the weights before it were published.
    replicas, hybrids, hybrids_joining, hybrids_lost : int
        Core replicas; hybrid replicas that computed a slice, had not received their state yet, or were lost or failed with
        a slice that the core then computed. Maxima over the optimizer steps; lost ones in total.
    reduce_s, reduce_bytes
        Seconds in the reduction over the core, and bytes reduced on each of its replicas.
    hybrid_wait_s, hybrid_copy_s, hybrid_blocked_s : float
        Seconds the core waited for hybrids after its own slices; seconds in which stepped weights were copied for hybrids to
        pull; seconds the step waited before it began for a copy of the weights that a joiner had requested.
    hybrid_sent_bytes, hybrid_received_bytes : int
        Weights and slices to hybrids, gradients from them, in this step.
    peak_bytes : int
        Peak memory of the first core replica's process in the step (`libra.train.step_report`); 0 if the system does not
        report it.
    """

    step: int
    digest: str
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    optimizer_steps: int = 0
    sequences: int = 0
    excluded_sequences: int = 0
    action_tokens: int = 0
    forwarded_sequences: int = 0
    forwarded_tokens: int = 0
    rows: int = 0
    micro_batches: int = 0
    packing_efficiency_frac: float = 0.0
    ratio_mean: float = 0.0
    ratio_max: float = 0.0
    clip_low_frac: float = 0.0
    clip_high_frac: float = 0.0
    kl_behaviour: float = 0.0
    kl_reference: float = 0.0
    entropy: float = 0.0
    mismatch_tokens: int = 0
    mismatch_mean_abs: float | None = None
    mismatch_max_abs: float | None = None
    pack_s: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0
    total_s: float = 0.0
    tokens_per_s: float = 0.0
    correction_frac: float = 0.0
    effective_sample_frac: float = 1.0
    exact_old_frac: float = 0.0
    mismatch_k3: float | None = None
    mismatch_effective_frac: float | None = None
    replicas: int = 1
    hybrids: int = 0
    hybrids_joining: int = 0
    hybrids_lost: int = 0
    reduce_s: float = 0.0
    reduce_bytes: int = 0
    hybrid_wait_s: float = 0.0
    hybrid_copy_s: float = 0.0
    hybrid_blocked_s: float = 0.0
    hybrid_sent_bytes: int = 0
    hybrid_received_bytes: int = 0
    peak_bytes: int = 0
    rejected_frac: float = 0.0
    old_logp_s: float = 0.0
    kl_coef: float = 0.0
    expert_load_ratio: float = 0.0
    routes_replayed_frac: float = 0.0
    routes_equal_frac: float = 0.0
    mismatch_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    mismatch_worst: list[dict[str, Any]] = field(default_factory=list)
    kl_teacher: float = 0.0
    taught_frac: float = 0.0
    top_k_teacher_frac: float = 0.0
    top_k_student_frac: float = 0.0
    publish_wait_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


_COUNTS = {each.name for each in fields(StepReport) if each.type == "int"}
_MOST = ("replicas", "hybrids", "hybrids_joining", "peak_bytes")


@dataclass(slots=True)
class Tally:
    """Sums and maxima collected during one step, from which the report is made."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    stepped: bool = False
    """Whether the weights have moved since the step began."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """Tokens with the largest gaps between engine and trainer."""

    def part(self) -> Tally:
        """An empty tally for one slice of a minibatch."""
        return Tally(stepped=self.stepped)

    def take(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        """Add the tally of another replica. Of seconds (names in ``_s``) the maximum counts, because replicas run at
        once."""
        for name, amount in sums.items():
            if not name.endswith("_s"):
                self.add(**{name: amount})
        self.at_least(**maxima)

    def add(self, **amounts: float) -> None:
        """Add to the named sums."""
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def at_least(self, **values: float) -> None:
        """Raise the named maxima."""
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)

    def mean(self, name: str, count: str) -> float:
        """One sum over another, 0 if nothing was counted."""
        total = self.sums.get(count, 0.0)
        return self.sums.get(name, 0.0) / total if total else 0.0

    def _effective_frac(self, total: str, square: str, count: str) -> float:
        """Effective sample size over the number of tokens; 1 if there are none."""
        squares = self.sums.get(square, 0.0) * self.sums.get(count, 0.0)
        return self.sums[total] ** 2 / squares if squares else 1.0

    def mismatch(self) -> dict[str, float | None]:
        """The figures of `libra.train.mismatch`; None where no token was compared."""
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
            "loss": self.mean("loss", "minibatches"),
            "grad_norm": self.mean("grad_norm", "optimizer_steps"),
            "packing_efficiency_frac": self.mean("forwarded_tokens", "places"),
            "ratio_mean": self.mean("ratio_sum", "scored"),
            "ratio_max": self.maxima.get("ratio_max", 0.0),
            "clip_low_frac": self.mean("clipped_low", "scored"),
            "clip_high_frac": self.mean("clipped_high", "scored"),
            "kl_behaviour": self.mean("kl_sum", "scored"),
            "kl_reference": self.mean("kl_reference", "scored") or self.mean("kl_reward", "kl_reward_tokens"),
            "entropy": self.mean("entropy", "scored"),
            "kl_teacher": self.mean("kl_teacher", "taught"),
            "taught_frac": self.mean("taught", "scored"),
            "top_k_teacher_frac": self.mean("top_k_teacher", "taught"),
            "top_k_student_frac": self.mean("top_k_student", "taught"),
            **self.mismatch(),
            "correction_frac": self.mean("corrected", "scored"),
            "rejected_frac": self.mean("rejected", "scored"),
            "effective_sample_frac": self._effective_frac("weight_sum", "weight_square_sum", "scored"),
            "exact_old_frac": self.mean("exact_old", "scored"),
            "expert_load_ratio": self.mean("expert_ratio", "expert_batches"),
            "routes_replayed_frac": self.mean("routed_places", "layer_places"),
            "routes_equal_frac": self.mean("equal_places", "routed_places"),
            "tokens_per_s": self.sums.get("forwarded_tokens", 0.0) / total_s if total_s > 0 else 0.0,
        }
        values: dict[str, Any] = {**same, **most, **found}
        return StepReport(step=step, digest=digest, lr=lr, total_s=total_s, **values)


logger = logging.getLogger(__name__)
MAPPED_FROM_BYTES = 2**18
"""Tensors of at least this size are mapped separately in a process that trains a large model on a CPU."""
LARGE_MODEL_BYTES = 2**26
"""Bytes of weights from which on a model is large: for a smaller one, fresh pages would cost a tenth of each step and save
almost nothing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@cache
def map_large_tensors() -> bool:
    """Make glibc map large tensors separately, so that freeing one returns its memory; False with another C library.

    By default glibc keeps tensors of up to 32 MB in one heap, which their different lifetimes fragment: a step of 1.6 GB
    of tensors was resident with 2.4 GB, and 2.3 GB of that stayed after it. The price is the system's time for fresh pages.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    done = mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, MAPPED_FROM_BYTES)
    logger.debug("tensors of %d bytes and more are mapped on their own: %s", MAPPED_FROM_BYTES, bool(done))
    return bool(done)


def _trim() -> None:
    """Make glibc return the memory of freed small tensors; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:  # another C library has none
        trim(0)


def resident_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process, now or (``VmHWM``) at its peak; 0 if the system does not report it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class StepMemory:
    """Peak memory of this process in a step, above the memory at the creation of this object.

    ``device`` is that of the model, which is loaded later.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        _trim()  # free memory in the heap does not count
        self.before_bytes = 0 if self.device.type == "cuda" else resident_bytes()
        self._watching = self._maps = False

    def model_loaded(self, num_bytes: int) -> None:
        """The weights were loaded; with a large model on a CPU, freed memory goes back to the system from now on."""
        if self.device.type == "cpu" and num_bytes >= LARGE_MODEL_BYTES:
            self._maps = map_large_tensors()

    def start(self) -> None:
        """A step begins: the peak is set back."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._watching = True
            return
        if self._maps:
            _trim()
        try:
            _CLEAR.write_text("5")
            self._watching = True
        except OSError:  # not Linux, or not allowed
            self._watching = False

    def peak_bytes(self) -> int:
        """The peak since `start`; 0 if the system does not report it."""
        if not self._watching:
            return 0
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(resident_bytes("VmHWM") - self.before_bytes, 0)
