"""What a training step does with a batch: optimizer, loss and how sequences are laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from libra.errors import ConfigError

ALGORITHMS = ("grpo",)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of one replica, fixed for its life. Names and defaults are those of ``trainer:`` in a configuration.

    Attributes
    ----------
    algorithm : str
        Loss family; "grpo" is the clipped policy loss with token-mean.
    lr, betas, weight_decay
        AdamW (arXiv:1711.05101); ``lr=0`` leaves the weights bit for bit as they are.
    warmup_steps : int
        Steps over which the learning rate rises linearly to ``lr``; the first uses ``lr / warmup_steps``.
    max_grad_norm : float
        The gradient is scaled down to this 2-norm where it is longer.
    clip_low, clip_high : float
        The ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip : float or None
        Bound of the loss for negative advantages, in units of -advantage.
    kl_coef : float
        Weight of the k3 divergence to the frozen initial model; 0: no reference model is loaded.
    epochs, minibatches : int
        Passes over the batch, and optimizer steps per pass.
    max_row_tokens : int
        Rows are filled with whole sequences up to this length; a longer sequence has a row of its own.
    share_prompts : bool
        Samples with the same prompt share it in a row, where the model has full attention only. Changes no result.
    micro_batch_tokens : int
        Rows times width of one forward pass, padding included: the dial for memory.
    temperature : float
        Of the sampling; logits are divided by it, so that log-probabilities here and there mean the same.
    """

    algorithm: str = "grpo"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coef: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    max_row_tokens: int = 512
    share_prompts: bool = True
    micro_batch_tokens: int = 4096
    temperature: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "algorithm": (self.algorithm in ALGORITHMS, f"one of {', '.join(ALGORITHMS)}"),
            "lr": (math.isfinite(self.lr) and self.lr >= 0, "a finite number >= 0"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, ">= 0"),
            "warmup_steps": (self.warmup_steps >= 0, ">= 0"),
            "max_grad_norm": (self.max_grad_norm > 0, "> 0"),
            "clip_low": (0 <= self.clip_low < 1, "in [0, 1)"),
            "clip_high": (self.clip_high >= 0, ">= 0"),
            "dual_clip": (self.dual_clip is None or self.dual_clip > 1, "None or > 1"),
            "kl_coef": (self.kl_coef >= 0, ">= 0"),
            "epochs": (self.epochs >= 1, ">= 1"),
            "minibatches": (self.minibatches >= 1, ">= 1"),
            "max_row_tokens": (self.max_row_tokens >= 1, ">= 1"),
            "micro_batch_tokens": (self.micro_batch_tokens >= 1, ">= 1"),
            "temperature": (self.temperature > 0, "> 0 (greedy samples have no log-probability to learn from)"),
        }
        for name, (ok, allowed) in rules.items():
            if not ok:
                raise ConfigError(f"trainer.{name}: got {getattr(self, name)!r}; allowed is {allowed}")

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (0-based)."""
        return self.lr if step >= self.warmup_steps else self.lr * (step + 1) / self.warmup_steps
