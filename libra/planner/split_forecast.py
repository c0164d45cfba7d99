"""Predicted steps of a run with more or fewer of its hybrid workers training, from its own measurements, and their error.
Pure.

Rollout is predicted by the measured speeds of the engines that would be left (`libra.planner.measured_step`), training by a line
through the seconds of steps over the tokens of one replica. While every step had equally many tokens per replica the line goes
through the origin: twice the replicas take half the time until this run has measured otherwise.

1. A prediction uses only iterations that have ended. A split is evaluated on the last batch, as a model of the next one.
2. At least one engine whose speed is known stays. Core trainers and workers that are not hybrid are never moved.

Differs from Libra (arXiv:2606.03077 v2), whose planner predicts both sides from fits made before the run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from libra.errors import PlanError
from libra.planner.measured_step import FIRST_WEIGHT, HALF_LIFE_STEPS, ExpectedStep, StepForecast, TokenLine

PRIOR_TOKENS = 0.25
"""Weight of the prior that training's seconds are proportional to a replica's tokens: as steps whose tokens differ by a
half."""
NOISE_FROM = 2
"""Steps behind a prediction before its error counts as noise: a run's first step includes allocations and first calls."""
WATCHED = 7
"""Iterations whose errors are the noise: enough to be robust to one or two that drift."""
NORMAL = 1.4826
"""Standard deviations of a normal distribution per median of its absolute values."""


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """Seconds of an optimizer step over the tokens of one replica, as a line; newer steps count more."""

    line: TokenLine = field(default_factory=TokenLine)
    num_steps: int = 0

    def after(self, tokens: float, replicas: int, train_s: float) -> TrainingForecast:
        """The line with a step of ``tokens`` tokens on ``replicas`` replicas; a step without tokens changes nothing."""
        if replicas < 1 or not train_s >= 0:
            raise PlanError(
                f"a step on {replicas} replicas took {train_s} s; expected at least one replica and no negative time"
            )
        if tokens <= 0:
            return self
        keep, weight = 0.5 ** (1.0 / HALF_LIFE_STEPS), 1.0 if self.num_steps else FIRST_WEIGHT
        return TrainingForecast(self.line.after([(tokens / replicas, train_s)], keep, weight), self.num_steps + 1)

    def expected_s(self, tokens: float, replicas: int) -> float:
        """Seconds of a step of ``tokens`` tokens on ``replicas`` replicas; 0 while nothing is measured."""
        if not self.line.n:
            return 0.0
        mean_tokens, mean_s = self.line.mean
        proportional = mean_s / mean_tokens
        slope = self.line.slope(proportional, PRIOR_TOKENS * self.line.n * mean_tokens**2)
        slope = min(max(slope, 0.0), proportional)  # a step has fixed costs, and they are not negative
        return mean_s + slope * (tokens / replicas - mean_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The last batch: tokens generated for it, tokens that its step trained on."""

    generated_tokens: float
    trained_tokens: float


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits that a run may have: ``engines[n]`` are the remaining engines by kind if n hybrids train; ``training``
    hybrids train now."""

    engines: Sequence[Counter[str]]
    training: int
    core_trainers: int


def gain_error(before: ExpectedStep, other: ExpectedStep, train_s: float, step_s: float, overlap: bool) -> float:
    """Error of the gain of ``other`` over the present split, as predicted by ``before``, as a share of the iteration's
    step.

    The seconds of the present split are measured afterwards; those of the other split are assumed to be longer by the same
    factor, phase by phase. So a slowdown of the whole machine changes no gain. If steps overlap, rollout and training
    cannot be separated, and the error of the step is used.
    """
    if overlap or before.rollout_s <= 0 or before.train_s <= 0:
        return abs(1.0 - before.step_s / step_s)
    rollout_s = max(step_s - train_s - before.rest_s, 0.0)
    there_s = other.rollout_s * rollout_s / before.rollout_s + other.train_s * train_s / before.train_s + before.rest_s
    return abs((1.0 - other.step_s / before.step_s) - (1.0 - there_s / step_s))


@dataclass(slots=True)
class SplitForecast:
    """The measurements of a run's splits between iterations.

    Attributes
    ----------
    errors : list of float
        Errors of the predicted gain of another split, as a share of the step, for each of the last iterations.
    """

    trainings: TrainingForecast = field(default_factory=TrainingForecast)
    errors: list[float] = field(default_factory=list)

    def expected(
        self, forecast: StepForecast, splits: Splits, batch: Batch, num: int, overlap: bool
    ) -> ExpectedStep | None:
        """The step of this batch if ``num`` hybrids train; None if no engine with a known speed remains."""
        found = forecast.expected(splits.engines[num], None, overlap, tokens=batch.generated_tokens)
        if found is None:
            return None
        train_s = self.trainings.expected_s(batch.trained_tokens, splits.core_trainers + num)
        return ExpectedStep.of(found.tokens, found.rollout_s, train_s, found.rest_s, overlap)

    def learn(
        self,
        forecast: StepForecast,
        splits: Splits,
        batch: Batch,
        replicas: int,
        train_s: float,
        step_s: float,
        overlap: bool,
    ) -> None:
        """Learn from an iteration with ``splits.training`` hybrids from end to end, and its optimizer step on ``replicas``
        replicas.

        ``forecast`` is the one before it, and is scored on the iteration, given the batch's tokens.
        """
        before = self.expected(forecast, splits, batch, splits.training, overlap)
        if before is not None and before.step_s > 0 and self.trainings.num_steps >= NOISE_FROM:
            others = [
                self.expected(forecast, splits, batch, num, overlap)
                for num in range(len(splits.engines))
                if num != splits.training
            ]
            found = [gain_error(before, other, train_s, step_s, overlap) for other in others if other is not None]
            self.errors = [*self.errors, max(found, default=0.0)][-WATCHED:]
        self.trainings = self.trainings.after(batch.trained_tokens, replicas, train_s)

    @property
    def noise_frac(self) -> float:
        """Typical error of predicted gains; 0 while unknown.

        A median, because the prediction for the iteration in which a workload changes is far off, and the next ones are
        not.
        """
        return NORMAL * statistics.median(self.errors) if self.errors else 0.0
