"""Seconds of a run's next step, predicted from its own measurements. Pure.

Each kind of engine has its own tokens per second. The next batch's tokens, and those with a
gradient, are predicted from the known lengths of its questions (groups with equal rewards carry
none, and tend to have short questions). The rest of a step stays as measured. For other splits,
`TrainingForecast` fits step seconds over tokens per replica. Deviates from Libra (arXiv:2606.03077
v2), whose planner fits both sides before the run.

1. A prediction uses only iterations that have ended.
2. Before the first iteration there is no prediction.
3. Evaluations are excluded from all numbers, and the first iteration, a warm-up, counts less.
4. While every step had equally many tokens per replica, the training line goes through the origin:
   twice the replicas take half the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HALF_LIFE_STEPS = 3.0
"""Iterations after which the weight of an observation halves."""
FIRST_WEIGHT = 0.3
"""Weight of a run's first iteration, which includes allocations and cold caches; later ones count 1."""
PRIOR_LOG2 = 0.04
"""Prior that rollout time is proportional to tokens, as an observation 20 % off in tokens."""
PRIOR_TRAINING = 0.04
"""Prior that training time is proportional to tokens with a gradient, likewise."""
PRIOR_QUESTIONS = 2.0
"""Weight of the prior that tokens do not depend on question length, in questions of ordinary spread."""


@dataclass(frozen=True, slots=True)
class RealisedStep:
    """Seconds of an iteration: to its last trajectory, in its optimizer step, step to step."""

    rollout_s: float
    training_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """Measured seconds and tokens of an iteration."""

    rollout_s: float  # from the arrival of the batch's weights to its last trajectory, less waits for training
    train_s: float
    rest_s: float  # publishing, or the part of it that exceeds an overlapping next step
    step_s: float  # end of the previous iteration to the end of this one, less evaluations
    tokens: Mapping[str, int]  # generated for the batch, by kind of engine
    questions: Sequence[tuple[float, float]]  # by group: question length, tokens generated
    trained: Sequence[tuple[float, float]] = ()  # by group: question length, tokens with a gradient


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """Predicted seconds of a step; ``tokens`` are the predicted tokens of its batch."""

    tokens: float
    rollout_s: float
    train_s: float
    rest_s: float
    step_s: float

    @classmethod
    def of(cls, tokens: float, rollout_s: float, train_s: float, rest_s: float, overlap: bool) -> ExpectedStep:
        """A step from its parts; ``overlap``: its batch is generated during the previous step."""
        waits_s = train_s + rest_s
        return cls(tokens, rollout_s, train_s, rest_s, max(rollout_s, waits_s) if overlap else rollout_s + waits_s)


@dataclass(frozen=True, slots=True)
class TokenLine:
    """Decayed sums for a weighted line y over x with a prior on the slope. (scipy has no such fit.)"""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def after(self, points: Sequence[tuple[float, float]], keep: float, weight: float) -> TokenLine:
        """The line with more (x, y) points of this weight; older ones are multiplied by ``keep``."""
        added = [sum(column) for column in zip(*((1.0, x, y, x * x, x * y) for x, y in points), strict=True)]
        before = (self.n, self.x, self.y, self.xx, self.xy)
        return TokenLine(*(keep * old + weight * new for old, new in zip(before, added or [0.0] * 5, strict=True)))

    @property
    def mean(self) -> tuple[float, float]:
        """Means of x and y."""
        return self.x / self.n, self.y / self.n

    def slope(self, prior: float, strength: float) -> float:
        """Slope of y over x; the ``prior`` slope has squared x deviations that sum to ``strength``."""
        mean_x, mean_y = self.mean
        spread, together = max(self.xx - self.n * mean_x**2, 0.0), self.xy - self.n * mean_x * mean_y
        return (together + strength * prior) / (spread + strength) if spread + strength > 0 else prior


def capacity_of(engines: Mapping[str, int], engine_s: Mapping[str, tuple[float, float]]) -> float:
    """Throughput in engines of the first measured kind; unmeasured kinds are left out.

    A ratio, which a batch that leaves all engines half empty does not change.
    """
    speeds = {kind: tokens / spent_s for kind, (tokens, spent_s) in engine_s.items() if tokens > 0 < spent_s}
    if not speeds:
        return 0.0
    return sum(number * speeds.get(kind, 0.0) for kind, number in engines.items()) / next(iter(speeds.values()))


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The measurements of a run's ``num_steps`` steps; `after` adds one."""

    num_steps: int = 0
    weight: float = 0.0
    train_s: float = 0.0
    rest_s: float = 0.0
    engine_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # decayed (tokens, seconds) by kind
    questions: TokenLine = field(default_factory=TokenLine)
    rollouts: TokenLine = field(default_factory=TokenLine)  # log engine-seconds of rollout over log tokens
    gradients: TokenLine = field(default_factory=TokenLine)  # tokens with a gradient over question length
    trainings: TokenLine = field(default_factory=TokenLine)  # seconds of a training step over tokens with a gradient

    def after(self, taken: Taken, engines: Mapping[str, int]) -> StepForecast:
        """The forecast with one more iteration, generated on ``engines`` of each kind."""
        keep, weight = 0.5 ** (1.0 / HALF_LIFE_STEPS), 1.0 if self.num_steps else FIRST_WEIGHT
        sums = {kind: (keep * tokens, keep * spent_s) for kind, (tokens, spent_s) in self.engine_s.items()}
        for kind, number in engines.items():
            tokens, spent_s = sums.get(kind, (0.0, 0.0))
            sums[kind] = tokens + weight * taken.tokens.get(kind, 0), spent_s + weight * number * taken.rollout_s
        total, capacity = sum(taken.tokens.values()), capacity_of(engines, sums)
        point = [(math.log(total), math.log(taken.rollout_s * capacity))] if total and capacity else []
        return StepForecast(
            self.num_steps + 1,
            keep * self.weight + weight,
            keep * self.train_s + weight * taken.train_s,
            keep * self.rest_s + weight * taken.rest_s,
            sums,
            self.questions.after(taken.questions, keep, weight),
            self.rollouts.after(point, keep, weight),
            self.gradients.after(taken.trained, keep, weight),
            self.trainings.after(
                [(sum(tokens for _, tokens in taken.trained), taken.train_s)] if taken.trained else [], keep, weight
            ),
        )

    def tokens_per_s(self) -> dict[str, float]:
        """Tokens per second of one engine of each kind during rollout."""
        return {kind: tokens / spent_s for kind, (tokens, spent_s) in self.engine_s.items() if spent_s > 0}

    def expected(
        self,
        engines: Mapping[str, int],
        questions: Sequence[float] | None,
        overlap: bool,
        tokens: float | None = None,
    ) -> ExpectedStep | None:
        """The next step; None if no present kind of engine has been measured.

        ``engines`` counts by kind; unmeasured kinds are left out. ``questions`` are question
        lengths (default: the mean), which predict ``tokens`` if not given. ``overlap``: the batch
        is generated during the previous step.
        """
        capacity = capacity_of(engines, self.engine_s)
        if not (self.rollouts.n and capacity > 0):
            return None
        usual, usual_s = (math.exp(value) for value in self.rollouts.mean)
        if tokens is None:
            tokens = self._tokens(questions) if questions else usual
        # Twice the tokens seldom take twice the time: they fill the engines, and the longest trajectory hardly grows.
        power = min(max(self.rollouts.slope(1.0, PRIOR_LOG2), 0.0), 1.0)
        rollout_s = usual_s / capacity * (max(tokens, 1.0) / usual) ** power
        train_s, rest_s = self._train_s(questions), self.rest_s / self.weight
        return ExpectedStep.of(tokens, rollout_s, train_s, rest_s, overlap)

    def _train_s(self, questions: Sequence[float] | None) -> float:
        usual_s = self.train_s / self.weight
        if not (questions and self.gradients.n and self.trainings.n):
            return usual_s
        usual, mean_s = self.trainings.mean
        if not usual:
            return usual_s
        slope = self.trainings.slope(mean_s / usual, PRIOR_TRAINING * usual**2)
        return max(mean_s + slope * (expected_of(self.gradients, questions) - usual), 0.1 * mean_s)

    def _tokens(self, questions: Sequence[float]) -> float:
        if not self.questions.n:
            return math.exp(self.rollouts.mean[0])
        return expected_of(self.questions, questions)


def expected_of(line: TokenLine, lengths: Sequence[float]) -> float:
    """Sum of a line's predictions for these question lengths."""
    mean_length, mean = line.mean
    spread = max(line.xx / line.n - mean_length**2, 0.0)
    slope = line.slope(0.0, PRIOR_QUESTIONS * spread)
    # At least a tenth of the mean each: far from the data a line predicts nothing.
    return sum(max(mean + slope * (length - mean_length), 0.1 * mean) for length in lengths)


PRIOR_TOKENS = 0.25
"""Prior that training time is proportional to tokens, as steps 50 % off in tokens."""


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """Optimizer step seconds over tokens per replica, as a line; newer steps count more."""

    line: TokenLine = field(default_factory=TokenLine)
    num_steps: int = 0

    def after(self, tokens: float, replicas: int, train_s: float) -> TrainingForecast:
        """The line with one more step on ``replicas`` replicas; a step without tokens changes nothing."""
        if tokens <= 0:
            return self
        keep, weight = 0.5 ** (1.0 / HALF_LIFE_STEPS), 1.0 if self.num_steps else FIRST_WEIGHT
        return TrainingForecast(self.line.after([(tokens / replicas, train_s)], keep, weight), self.num_steps + 1)

    def expected_s(self, tokens: float, replicas: int) -> float:
        """Seconds of a step of ``tokens`` tokens on ``replicas`` replicas; 0 while unmeasured."""
        if not self.line.n:
            return 0.0
        mean_tokens, mean_s = self.line.mean
        proportional = mean_s / mean_tokens
        slope = self.line.slope(proportional, PRIOR_TOKENS * self.line.n * mean_tokens**2)
        slope = min(max(slope, 0.0), proportional)  # a step has fixed costs, which are not negative
        return mean_s + slope * (tokens / replicas - mean_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The last batch: tokens generated for it, and tokens trained on."""

    generated_tokens: float
    trained_tokens: float
