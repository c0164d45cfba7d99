"""The settings of a replica: section ``trainer``, and fields of ``rollout`` and ``distil``."""

from __future__ import annotations

import math
import numbers
from typing import Annotated, Any

from pydantic import Field, ValidationError

from libra.config import RunConfig
from libra.config.section import Section
from libra.config.task_sections import KLDirection
from libra.config.trainer import ROUNDING_NATS, TrainerSection
from libra.errors import ConfigError, TrainError
from libra.named_parts import is_named, named_part

_BEFORE_THE_STEP = {
    "algorithm", "prompts", "group_size", "resample", "advantage", "normalize_std", "drop_uniform_groups", "train_prompts",
    "drop_truncated", "dispatch", "streaming",
}  # fmt: skip
"""Fields that shape the batch, its advantages and its transfer, before the replica sees it."""


def rounding_nats(config: RunConfig) -> float:
    """Mean mismatch of engine and trainer in nats due to number format and ``rollout.top_p``."""
    return ROUNDING_NATS[config.model.dtype] - math.log(config.rollout.top_p)


class DistilTerm(Section):
    """The fields of ``distil`` that a step needs."""

    divergence: KLDirection = "forward"
    reward_coef: float = 0.0
    rounding_nats: float = 0.0
    """Mean |log q - log p| of a token that rounding explains: up to it the divergence has no gradient."""


class TrainSettings(TrainerSection):
    """Settings of one replica, fixed for its lifetime, with the presets of ``trainer:``.
    ConfigError for a value outside its range or an unknown name; a configuration checks
    combinations."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """``rollout.temperature``, which divides logits; greedy samples (0) have no log-probability to learn from."""
    loss_divisor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `aggregation` seq-mean-token-sum-norm in tokens: ``rollout.max_context_tokens``."""
    ewma_decay: Annotated[float, Field(ge=0, lt=1)] = 0.889
    """Share of the moving average that stays at each batch; 0.889 averages about eight (PPO-EWMA)."""
    kl_horizon: Annotated[float, Field(gt=0)] = 10_000.0
    """Trajectories over which ``kl_args.target`` acts."""
    share_prompts: bool = True
    """Whether samples of a group that fit into one row share one forward pass of their prompt."""
    distil: DistilTerm | None = None
    """The term of a teacher, if there is one."""
    rounding_nats: float | None = None
    """Mean mismatch that rounding explains, if known; replaces a missing ``mismatch_args.mean``."""
    exact_logprobs: bool = False
    """``rollout.exact_logprobs``: measure the mismatch by scoring as the engine did, alone and turn by turn."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"trainer.{name}: got {first['input']!r}; {first['msg']}") from error

    @classmethod
    def of_run(cls, config: RunConfig) -> TrainSettings:
        """The settings of a run's replicas."""
        rollout, distil = config.rollout, config.distil
        term = None
        if distil.teacher is not None:
            rounding = ROUNDING_NATS[config.model.dtype]
            term = DistilTerm(divergence=distil.divergence, reward_coef=distil.reward_coef, rounding_nats=rounding)
        return cls(
            **config.trainer.model_dump(),
            loss_divisor=float(rollout.max_context_tokens),
            temperature=rollout.temperature,
            exact_logprobs=rollout.exact_logprobs,
            distil=term,
            rounding_nats=rounding_nats(config),
        )

    @property
    def has_token_rewards(self) -> bool:
        """Whether tokens have rewards: a KL penalty in the reward, or discounted returns."""
        penalty = self.kl_args["in_reward"] and self.kl_coef > 0
        return penalty or (self.advantage == "reinforce_pp" and self.gamma < 1)

    def of_a_step(self) -> dict[str, Any]:
        """The fields that a step depends on, for checkpoints and comparison of replicas."""
        return self.model_dump(exclude=_BEFORE_THE_STEP)

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (0-based); with a warm-up the first is ``lr /
        warmup_steps``. TrainError if a user's schedule gives no finite factor of at least 0."""
        risen = self.lr if step >= self.warmup_steps else self.lr * (step + 1) / self.warmup_steps
        if not is_named(self.lr_schedule):
            return risen
        factor = named_part("trainer.lr_schedule", self.lr_schedule)(step, settings=self)
        if not (isinstance(factor, numbers.Real) and 0 <= float(factor) < float("inf")):
            raise TrainError(
                f"trainer.lr_schedule: {self.lr_schedule!r} gave {factor!r} for step {step}; a factor is a finite number of at "
                "least 0"
            )
        return risen * float(factor)
