"""Parts of training that a user names as ``package.module:attribute``: loss, advantage, rate.

Each has a protocol, and a check before the run starts; `libra.testing.parts` has contract tests.

Shape legend: N action tokens of a micro-batch, G samples of one group.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from libra.config.trainer import TrainerSection
from libra.errors import ConfigError, TrainError
from libra.named_parts import is_named, named_function, named_part
from libra.train.advantages import GroupRewards
from libra.train.losses import Sequences
from libra.train.replica_settings import TrainSettings

LOSS_CALL = "f(logp, old_logp, advantage, *, sequences, settings)"
ADVANTAGE_CALL = "f(groups, *, settings)"
SCHEDULE_CALL = "f(step, *, settings)"


class TokenLoss(Protocol):
    """``trainer.loss``: the loss of each action token, later weighted and aggregated."""

    def __call__(
        self,
        logp_N: Tensor,
        old_logp_N: Tensor,
        advantage_N: Tensor,
        /,
        *,
        sequences: Sequences,
        settings: TrainSettings,
    ) -> Tensor:
        """One loss per token, floating (N,), with gradient to ``logp_N``.

        Log-probabilities are in nats; ``old_logp_N`` is in the ratio's denominator
        (``trainer.old_logp``). The loss of a sequence must not depend on the other sequences of the
        micro-batch or their order. ``settings`` is section ``trainer``, with the user's arguments
        in ``settings.loss_args``.
        """


class AdvantageEstimator(Protocol):
    """``trainer.advantage``: how much better than expected each sample of a batch was."""

    def __call__(self, groups: Sequence[GroupRewards], /, *, settings: TrainerSection) -> Sequence[ArrayLike]:
        """For each group a finite number per sample (G,), ignored if invalid; once per batch."""


class LRSchedule(Protocol):
    """``trainer.lr_schedule``: the learning rate over the steps of a run."""

    def __call__(self, step: int, /, *, settings: TrainSettings) -> float:
        """Factor of ``trainer.lr`` at ``step`` (from 0), finite and at least 0; warm-up multiplies
        it. A step must have the same rate on every replica and after a resume."""


# -------------------------------------------------------------------- use


def own_losses(
    settings: TrainSettings, logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, sequences: Sequences
) -> Tensor:
    """The token losses of a user's function; TrainError unless they are a floating tensor (N,)."""
    loss_N = named_part("trainer.loss", settings.loss)(
        logp_N, old_N, advantage_N, sequences=sequences, settings=settings
    )
    if not isinstance(loss_N, Tensor) or loss_N.shape != logp_N.shape or not loss_N.is_floating_point():
        raise TrainError(
            f"trainer.loss: {settings.loss!r} returned {_described(loss_N)} for {len(logp_N)} tokens; it returns one loss per "
            f"token, a floating tensor ({len(logp_N)},)"
        )
    return loss_N


def estimator_of(trainer: TrainerSection) -> str | Callable[[Sequence[GroupRewards]], list[NDArray[np.float64]]]:
    """``trainer.advantage`` for `batch_advantages`: a name, or the user's checked function."""
    if not is_named(trainer.advantage):
        return trainer.advantage
    function = named_part("trainer.advantage", trainer.advantage)

    def estimate(groups: Sequence[GroupRewards]) -> list[NDArray[np.float64]]:
        return _advantages(trainer.advantage, function(groups, settings=trainer), groups)

    return estimate


def _advantages(name: str, given: Any, groups: Sequence[GroupRewards]) -> list[NDArray[np.float64]]:
    try:
        found = [np.asarray(each, dtype=np.float64) for each in given]
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"trainer.advantage: {name!r} returned {_described(given)}; it returns a list with an array of numbers (G,) for "
            f"each group ({error})"
        ) from error
    shapes, wanted = [each.shape for each in found], [(len(group.reward),) for group in groups]
    if shapes != wanted:
        raise TrainError(f"trainer.advantage: {name!r} returned arrays of shapes {shapes}; allowed are {wanted}")
    for index, (each, group) in enumerate(zip(found, groups, strict=True)):
        if not np.isfinite(each[group.valid]).all():
            raise TrainError(
                f"trainer.advantage: {name!r} returned {each.tolist()} for group {index} with rewards {group.reward.tolist()}; "
                "an advantage is a finite number"
            )
    return [np.where(group.valid, each, 0.0) for each, group in zip(found, groups, strict=True)]


# -------------------------------------------------------------------- checks before the start


def check_own_parts(trainer: TrainerSection) -> None:
    """ConfigError if a user's part cannot be imported or breaks its protocol."""
    if is_named(trainer.loss):
        check_loss(trainer.loss, trainer)
    if is_named(trainer.advantage):
        check_advantage(trainer.advantage, trainer)
    if is_named(trainer.lr_schedule):
        check_schedule(trainer.lr_schedule, trainer)


def check_loss(name: str, trainer: TrainerSection | None = None) -> None:
    """ConfigError unless ``name`` is a `TokenLoss`, by a trial on five tokens of two sequences."""
    settings, field = _settings(trainer, loss=name), "trainer.loss"
    old_N = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])
    logp_N = (old_N + torch.tensor([0.1, -0.1, 0.05, 0.3, 0.0])).requires_grad_()
    advantage_N = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1]), 2)
    named_function(field, name, LOSS_CALL, logp_N, old_N, advantage_N, sequences=sequences, settings=settings)
    with _tried(field, name, "5 tokens", LOSS_CALL):
        loss_N = own_losses(settings, logp_N, old_N, advantage_N, sequences)
        if loss_N.requires_grad:
            loss_N.sum().backward()  # type: ignore[no-untyped-call]
    gradient_N = logp_N.grad
    if gradient_N is None or not bool(gradient_N.any()):
        raise ConfigError(f"{field}: {name!r} has no gradient to logp, so nothing would be learned; compute with logp")
    if not bool(torch.isfinite(loss_N).all() and torch.isfinite(gradient_N).all()):
        got = f"{loss_N.tolist()} with gradient {gradient_N.tolist()}"
        raise ConfigError(f"{field}: {name!r} gave {got}; both must be finite")


def check_advantage(name: str, trainer: TrainerSection | None = None) -> None:
    """ConfigError unless ``name`` is an `AdvantageEstimator`, by a trial on three groups."""
    settings, field = _settings(trainer, advantage=name), "trainer.advantage"
    groups = [group_of([1.0, 0.0, 0.5]), group_of([1.0, 1.0, 1.0]), group_of([1.0, 0.0, float("nan")])]
    named_function(field, name, ADVANTAGE_CALL, groups, settings=settings)
    estimate = estimator_of(settings)
    assert callable(estimate)
    with _tried(field, name, "3 groups", ADVANTAGE_CALL):
        estimate(groups)


def check_schedule(name: str, trainer: TrainerSection | None = None) -> None:
    """ConfigError unless ``name`` is an `LRSchedule`, by a trial of steps 0, 1 and 1000."""
    settings, field = _settings(trainer, lr_schedule=name), "trainer.lr_schedule"
    named_function(field, name, SCHEDULE_CALL, 0, settings=settings)
    for step in (0, 1, 1000):
        with _tried(field, name, f"step {step}", SCHEDULE_CALL):
            settings.lr_at(step)


@contextmanager
def _tried(field: str, name: str, what: str, call: str) -> Iterator[None]:
    try:
        yield
    except TrainError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise ConfigError(
            f"{field}: {name!r} raised {type(error).__name__}: {error}, for {what}; it is called as {call}"
        ) from error


def group_of(rewards: Sequence[float]) -> GroupRewards:
    """A group with these rewards; NaN is a failure that does not train."""
    valid = np.array([math.isfinite(reward) for reward in rewards])
    lengths = np.arange(1, len(rewards) + 1, dtype=np.int64) * 10
    return GroupRewards(np.array(rewards), valid, lengths, np.ones(len(rewards), np.bool_))


def _settings(trainer: TrainerSection | None, **own: str) -> TrainSettings:
    given = {} if trainer is None else {name: getattr(trainer, name) for name in TrainerSection.model_fields}
    return TrainSettings(**{**given, "loss_divisor": 1024.0, **own})


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r:.80}" if isinstance(value, numbers.Number | str) or value is None else f"a {type(value).__name__}"
