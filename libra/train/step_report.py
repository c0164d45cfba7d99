"""What one training step did, as flat numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step. Every field is a JSON number or string; means are over the action tokens forwarded.

    Attributes
    ----------
    step : int
        0-based; the step turned weights ``step`` into weights ``step + 1``.
    digest : str
        Content hash of the weights after the step (`libra.tensors.digest`).
    loss, grad_norm, lr
        Loss with KL term and entropy bonus, aggregated as configured; 2-norm of the gradient before clipping; means over
        optimizer steps.
    optimizer_steps : int
        0 where nothing had an advantage: then the weights stay as they are.
    sequences, action_tokens : int
        Trajectories that may train, and their generated tokens: what the denominator of the loss counts.
    excluded_sequences : int
        Trajectories of a failure class that does not train.
    forwarded_sequences, forwarded_tokens, rows, micro_batches : int
        What went through the model, over all passes; sequences without advantage need no forward pass where kl_coef=0.
    packing_efficiency_frac : float
        Real tokens over places computed (1: no padding).
    ratio_mean, ratio_max, clip_low_frac, clip_high_frac, kl_behaviour, kl_reference, entropy
        Of p_now / p_old as the loss sees it, the two clipped shares, divergences and entropy in nats.
    mismatch_tokens, mismatch_mean_abs, mismatch_max_abs
        |log p_rollout - log p_trainer| over tokens whose weights and KV cache are of the version being trained, before
        the first optimizer step (`libra.train.mismatch`).
    mismatch_k3, mismatch_effective_frac
        Over the same tokens: k3 of rollout against trainer in nats, and the effective sample size of p_trainer / p_rollout
        over the number of tokens.
    pack_s, forward_backward_s, optimizer_s, total_s : float
        Wall seconds; total includes the digest.
    tokens_per_s : float
        Forwarded tokens over total_s.
    correction_frac, effective_sample_frac : float
        Share of tokens whose importance weight was truncated or masked; effective sample size of the weights over the
        number of tokens (1: all weigh the same).
    exact_old_frac : float
        Share of tokens whose old log-probability is the trainer's own, under the weights that generated them.
    replicas, hybrids, hybrids_joining, hybrids_lost : int
        Core replicas; hybrid replicas that computed a slice, were there without their state yet, or were lost or failed with
        a slice that the core then computed; the most over the optimizer steps, lost ones in all.
    reduce_s, reduce_bytes
        Seconds in the reduction over the core, and bytes reduced on each of its replicas.
    hybrid_wait_s : float
        Seconds the core waited for hybrids after it was done with its own slices.
    hybrid_copy_s : float
        Seconds in which the stepped weights were copied for hybrids to pull.
    hybrid_blocked_s : float
        Seconds the step waited before it began, for a copy of the weights that a joiner had asked for.
    peak_bytes : int
        The most memory this process held in the step (`libra.train.process_memory`): on a GPU that of torch's tensors, on a CPU
        what was
        resident above what had been before the model was loaded. Of the first core replica; 0 where the system does not say.
    hybrid_sent_bytes, hybrid_received_bytes : int
        Weights and slices to hybrids, gradients from them, in this step.
    """

    step: int
    digest: str
    loss: float
    grad_norm: float
    lr: float
    optimizer_steps: int
    sequences: int
    excluded_sequences: int
    action_tokens: int
    forwarded_sequences: int
    forwarded_tokens: int
    rows: int
    micro_batches: int
    packing_efficiency_frac: float
    ratio_mean: float
    ratio_max: float
    clip_low_frac: float
    clip_high_frac: float
    kl_behaviour: float
    kl_reference: float
    entropy: float
    mismatch_tokens: int
    mismatch_mean_abs: float
    mismatch_max_abs: float
    pack_s: float
    forward_backward_s: float
    optimizer_s: float
    total_s: float
    tokens_per_s: float
    correction_frac: float = 0.0
    effective_sample_frac: float = 1.0
    exact_old_frac: float = 0.0
    mismatch_k3: float = 0.0
    mismatch_effective_frac: float = 1.0
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

    def as_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Sums and maxima collected during one step, from which the report is made."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    stepped: bool = False
    """Whether the weights have moved since the step began."""

    def part(self) -> Tally:
        """An empty tally for one slice of the minibatch at hand."""
        return Tally(stepped=self.stepped)

    def take(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        """Count what another replica's part holds; of seconds (names in ``_s``) the longest counts, for they run at once."""
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
        """One sum over another, 0 where nothing was counted."""
        total = self.sums.get(count, 0.0)
        return self.sums.get(name, 0.0) / total if total else 0.0

    def _effective_frac(self, total: str, square: str, count: str) -> float:
        """Effective sample size over the number of tokens; 1 where there are none."""
        squares = self.sums.get(square, 0.0) * self.sums.get(count, 0.0)
        return self.sums[total] ** 2 / squares if squares else 1.0

    def _of_the_group(self) -> dict[str, Any]:
        counts = {
            name: int(self.maxima.get(name, 1 if name == "replicas" else 0))
            for name in ("replicas", "hybrids", "hybrids_joining")
        }
        sums = ("hybrids_lost", "reduce_bytes", "hybrid_sent_bytes", "hybrid_received_bytes")
        seconds = ("reduce_s", "hybrid_wait_s", "hybrid_copy_s", "hybrid_blocked_s")
        return {
            **counts,
            "peak_bytes": int(self.maxima.get("peak_bytes", 0)),
            **{name: int(self.sums.get(name, 0)) for name in sums},
            **{name: self.sums.get(name, 0.0) for name in seconds},
        }

    def report(self, *, step: int, digest: str, lr: float, total_s: float) -> StepReport:
        """The step as numbers."""
        count = self.sums.get
        return StepReport(
            step=step,
            digest=digest,
            loss=self.mean("loss", "minibatches"),
            grad_norm=self.mean("grad_norm", "optimizer_steps"),
            lr=lr,
            optimizer_steps=int(count("optimizer_steps", 0)),
            sequences=int(count("sequences", 0)),
            excluded_sequences=int(count("excluded_sequences", 0)),
            action_tokens=int(count("action_tokens", 0)),
            forwarded_sequences=int(count("forwarded_sequences", 0)),
            forwarded_tokens=int(count("forwarded_tokens", 0)),
            rows=int(count("rows", 0)),
            micro_batches=int(count("micro_batches", 0)),
            packing_efficiency_frac=self.mean("forwarded_tokens", "places"),
            ratio_mean=self.mean("ratio_sum", "scored"),
            ratio_max=self.maxima.get("ratio_max", 0.0),
            clip_low_frac=self.mean("clipped_low", "scored"),
            clip_high_frac=self.mean("clipped_high", "scored"),
            kl_behaviour=self.mean("kl_sum", "scored"),
            kl_reference=self.mean("kl_reference", "scored"),
            entropy=self.mean("entropy", "scored"),
            mismatch_tokens=int(count("mismatch_tokens", 0)),
            mismatch_mean_abs=self.mean("mismatch_sum", "mismatch_tokens"),
            mismatch_max_abs=self.maxima.get("mismatch", 0.0),
            pack_s=count("pack_s", 0.0),
            forward_backward_s=count("forward_backward_s", 0.0),
            optimizer_s=count("optimizer_s", 0.0),
            total_s=total_s,
            tokens_per_s=count("forwarded_tokens", 0.0) / total_s if total_s > 0 else 0.0,
            correction_frac=self.mean("corrected", "scored"),
            effective_sample_frac=self._effective_frac("weight_sum", "weight_square_sum", "scored"),
            exact_old_frac=self.mean("exact_old", "scored"),
            mismatch_k3=self.mean("mismatch_k3", "mismatch_tokens"),
            mismatch_effective_frac=self._effective_frac(
                "mismatch_weight", "mismatch_weight_square", "mismatch_tokens"
            ),
            **self._of_the_group(),
        )
