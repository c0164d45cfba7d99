"""What a training step does with a batch: optimizer, loss and how sequences are laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from libra.config.algorithms import (
    ALGORITHMS,
    AggregationMode,
    CorrectionAction,
    CorrectionLevel,
    KLEstimator,
    LayoutName,
    LossName,
    OldLogp,
    preset_values,
)
from libra.errors import ConfigError

NOT_OF_A_STEP = ("advantage", "normalize_std")
"""Keys of a preset that are used before the step, where advantages are computed."""


_CHOICES: dict[str, Any] = {
    "loss": LossName,
    "aggregation": AggregationMode,
    "old_logp": OldLogp,
    "correction": CorrectionAction,
    "correction_level": CorrectionLevel,
    "kl_estimator": KLEstimator,
    "layout": LayoutName,
}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of one replica, fixed for its life. Names and defaults are those of ``trainer:`` in a configuration.

    Attributes
    ----------
    lr, betas, weight_decay
        AdamW (arXiv:1711.05101); ``lr=0`` leaves the weights bit for bit as they are.
    warmup_steps : int
        Steps over which the learning rate rises linearly to ``lr``; the first uses ``lr / warmup_steps``.
    max_grad_norm : float
        The gradient is scaled down to this 2-norm where it is longer.
    loss, clip_low, clip_high, dual_clip, tau_positive, tau_negative, log_ratio_coef
        The loss of a token; see `libra.train.losses`.
    aggregation, loss_divisor
        From tokens to the step; see `libra.train.aggregation`. The divisor is of the modes that have one.
    old_logp, correction, correction_level, correction_low, correction_high
        What the ratio is to, and the importance weight beside it; see `libra.train.objective`.
    kl_coef, kl_estimator, kl_bound
        Divergence to the frozen initial model; ``kl_coef=0``: no reference model is loaded.
    entropy_coef : float
        Weight of the entropy bonus.
    epochs, minibatches : int
        Passes over the batch, and optimizer steps per pass.
    max_row_tokens : int
        Rows are filled with whole sequences up to this length; a longer sequence has a row of its own.
    share_prompts : bool
        Samples with the same prompt share it in a row, where the model has full attention only. Changes no result.
    micro_batch_tokens : int
        Rows times width of one forward pass, padding included: the dial for memory.
    logit_chunk_tokens : int
        Action tokens whose logits are held at once (`libra.train.chunked_logprobs`). Changes no result but for the rounding of
        sums.
    layout : str
        How a model lies on the replicas of a group: whole on each (ddp), or in shards (fsdp2). Nothing where there is one.
    gradient_checkpointing : bool
        Layers keep their inputs and compute the rest again in the backward pass. Changes no result.
    offload : bool
        Of fsdp2: shards of weights, gradients and optimizer state lie in host memory between their uses.
    temperature : float
        Of the sampling; logits are divided by it, so that log-probabilities here and there mean the same.
    mismatch_alarm, mismatch_action
        Nats of mean mismatch above which "stop" refuses the step; the others are logged. See `libra.train.mismatch`.
    exact_logprobs : bool
        ``rollout.exact_logprobs``: measure the mismatch by scoring as the engine did, alone and turn by turn.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    loss: LossName = "ppo"
    aggregation: AggregationMode = "token-mean"
    loss_divisor: float | None = None
    old_logp: OldLogp = "behaviour"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    log_ratio_coef: float = 0.0
    correction: CorrectionAction = "none"
    correction_level: CorrectionLevel = "token"
    correction_low: float | None = None
    correction_high: float | None = 2.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_bound: float | None = 10.0
    entropy_coef: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    max_row_tokens: int = 512
    share_prompts: bool = True
    micro_batch_tokens: int = 4096
    logit_chunk_tokens: int = 1024
    layout: LayoutName = "ddp"
    gradient_checkpointing: bool = False
    offload: bool = False
    temperature: float = 1.0
    mismatch_alarm: float | None = None
    mismatch_action: Literal["warn", "pause", "stop"] = "warn"
    exact_logprobs: bool = False

    def __post_init__(self) -> None:
        rules = {
            **{
                name: (getattr(self, name) in get_args(kind), f"one of {', '.join(get_args(kind))}")
                for name, kind in _CHOICES.items()
            },
            "lr": (math.isfinite(self.lr) and self.lr >= 0, "a finite number >= 0"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, ">= 0"),
            "warmup_steps": (self.warmup_steps >= 0, ">= 0"),
            "max_grad_norm": (self.max_grad_norm > 0, "> 0"),
            "loss_divisor": (
                self.loss_divisor is not None and self.loss_divisor > 0
                if self.aggregation in ("seq-mean-token-sum-norm", "constant")
                else self.loss_divisor is None or self.loss_divisor > 0,
                f"a number above 0 where trainer.aggregation is {self.aggregation}",
            ),
            "clip_low": (0 <= self.clip_low <= 1, "in [0, 1]"),
            "clip_high": (self.clip_high >= 0, ">= 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "None or > 1"),
            "tau_positive": (self.tau_positive > 0, "> 0"),
            "tau_negative": (self.tau_negative > 0, "> 0"),
            "log_ratio_coef": (self.log_ratio_coef >= 0, ">= 0"),
            "kl_coef": (self.kl_coef >= 0, ">= 0"),
            "entropy_coef": (self.entropy_coef >= 0, ">= 0"),
            "epochs": (self.epochs >= 1, ">= 1"),
            "minibatches": (self.minibatches >= 1, ">= 1"),
            "max_row_tokens": (self.max_row_tokens >= 1, ">= 1"),
            "micro_batch_tokens": (self.micro_batch_tokens >= 1, ">= 1"),
            "logit_chunk_tokens": (self.logit_chunk_tokens >= 1, ">= 1"),
            "temperature": (self.temperature > 0, "> 0 (greedy samples have no log-probability to learn from)"),
        }
        rules["offload"] = (not self.offload or self.layout == "fsdp2", "false where trainer.layout is ddp")
        for name, (ok, allowed) in rules.items():
            if not ok:
                raise ConfigError(f"trainer.{name}: got {getattr(self, name)!r}; allowed is {allowed}")
        if self.correction != "none" and self.old_logp == "behaviour":
            raise ConfigError(
                f"trainer.correction: got {self.correction!r}; allowed is 'none' where trainer.old_logp is 'behaviour', "
                "whose ratio holds the correction already"
            )

    @classmethod
    def of_algorithm(cls, algorithm: str, **changes: Any) -> TrainSettings:
        """The settings of an algorithm's preset, with ``changes``; for use without a configuration."""
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"trainer.algorithm: got {algorithm!r}; allowed is one of {', '.join(ALGORITHMS)}")
        values = {name: value for name, value in preset_values(algorithm).items() if name not in NOT_OF_A_STEP}
        return cls(**{**values, **changes})

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (0-based)."""
        return self.lr if step >= self.warmup_steps else self.lr * (step + 1) / self.warmup_steps
