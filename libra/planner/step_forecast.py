"""Seconds of a run's next step, predicted from what its own engines and trainer have measured. Pure.

Engines of a run may differ: every kind has its own tokens per second, measured over the seconds in which batches were generated.
The tokens of the next batch are predicted from the lengths of its questions, which are known before it begins. Training follows the
tokens that carry a gradient, predicted likewise: groups with equal rewards have none, and those tend to have short questions. The
rest of a step (publishing, as far as it is not beside the next step) is predicted unchanged.

1. A prediction uses only iterations that have ended.
2. There is none before the first iteration: nothing is assumed.
3. Evaluations are excluded from all numbers; the first iteration, a warm-up, counts less than later ones.

Other splits between training and rollout are predicted from a line through the seconds of steps over the
tokens of one replica (`TrainingForecast`). While every step had equally many tokens per replica the line
goes through the origin: twice the replicas take half the time until this run has measured otherwise.
Differs from Libra (arXiv:2606.03077 v2), whose planner predicts both sides from fits made before the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HALF_LIFE_STEPS = 3.0
"""Iterations after which an observation counts half: lengths change within ten iterations, a shared machine faster."""
FIRST_WEIGHT = 0.3
"""Weight of a run's first iteration where later ones count 1: allocations, caches and first calls are in its seconds."""
PRIOR_LOG2 = 0.04
"""Weight of the prior that rollout's seconds are proportional to its tokens: as one observation whose tokens differ by 20
%."""
PRIOR_TRAINING = 0.04
"""Likewise for training's seconds and the tokens that carry a gradient."""
PRIOR_QUESTIONS = 2.0
"""Weight of the prior that tokens do not depend on a question's length: as this many questions of ordinary spread."""


@dataclass(frozen=True, slots=True)
class RealisedStep:
    """Seconds that an iteration took: until its last trajectory ended, its optimizer step, and from step to step."""

    rollout_s: float
    training_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds and tokens of an iteration."""

    rollout_s: float  # from the weights that its batch waited for until it was complete, without waits for training
    train_s: float
    rest_s: float  # publishing, or the part of it that exceeds the next step's training where it runs beside that
    step_s: float  # from the end of the iteration before to its own end, less evaluations
    tokens: Mapping[str, int]  # generated for its batch, by kind of engine
    questions: Sequence[tuple[float, float]]  # by group: length of its question, and tokens generated for it
    trained: Sequence[tuple[float, float]] = ()  # by group: length of its question, and tokens that carry a gradient


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """A predicted step, in seconds; ``tokens`` are those its batch is predicted to generate."""

    tokens: float
    rollout_s: float
    train_s: float
    rest_s: float
    step_s: float

    @classmethod
    def of(cls, tokens: float, rollout_s: float, train_s: float, rest_s: float, overlap: bool) -> ExpectedStep:
        """A step of these parts; with ``overlap`` its batch is generated while the step before is taken."""
        waits_s = train_s + rest_s
        return cls(tokens, rollout_s, train_s, rest_s, max(rollout_s, waits_s) if overlap else rollout_s + waits_s)


@dataclass(frozen=True, slots=True)
class TokenLine:
    """Decayed sums of a weighted line y over x; a prior stabilizes its slope. (scipy fits no line from decayed sums.)"""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def after(self, points: Sequence[tuple[float, float]], keep: float, weight: float) -> TokenLine:
        """The line with more (x, y) of this weight, and the weight of older ones reduced."""
        added = [sum(column) for column in zip(*((1.0, x, y, x * x, x * y) for x, y in points), strict=True)]
        before = (self.n, self.x, self.y, self.xx, self.xy)
        return TokenLine(*(keep * old + weight * new for old, new in zip(before, added or [0.0] * 5, strict=True)))

    @property
    def mean(self) -> tuple[float, float]:
        """Means of x and y."""
        return self.x / self.n, self.y / self.n

    def slope(self, prior: float, strength: float) -> float:
        """Of y over x; ``prior`` counts as points whose squared deviations of x add up to ``strength``."""
        mean_x, mean_y = self.mean
        spread, together = max(self.xx - self.n * mean_x**2, 0.0), self.xy - self.n * mean_x * mean_y
        return (together + strength * prior) / (spread + strength) if spread + strength > 0 else prior


def capacity_of(engines: Mapping[str, int], engine_s: Mapping[str, tuple[float, float]]) -> float:
    """Throughput of engines, in engines of the first known kind; those that have not generated yet do not count.

    A ratio: a batch that leaves all engines half empty does not change it.
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
    rollouts: TokenLine = field(default_factory=TokenLine)  # log seconds of a first kind's engine over log tokens
    gradients: TokenLine = field(default_factory=TokenLine)  # tokens with a gradient over the length of a question
    trainings: TokenLine = field(default_factory=TokenLine)  # seconds of a training step over those tokens

    def after(self, taken: Taken, engines: Mapping[str, int]) -> StepForecast:
        """The forecast with one more finished iteration, for which ``engines`` of each kind generated."""
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
        """Tokens per second of one engine of each kind while a batch is generated."""
        return {kind: tokens / spent_s for kind, (tokens, spent_s) in self.engine_s.items() if spent_s > 0}

    def expected(
        self,
        engines: Mapping[str, int],
        questions: Sequence[float] | None,
        overlap: bool,
        tokens: float | None = None,
    ) -> ExpectedStep | None:
        """The next step; None while nothing is measured, or if no engine has generated before.

        ``engines`` by kind: one that has not generated yet is left out, since its speed is unknown. ``questions`` are the
        lengths of the batch's questions (by default the mean), from which ``tokens`` are predicted if they are not given.
        With ``overlap`` the batch is generated while the step before is taken.
        """
        capacity = capacity_of(engines, self.engine_s)
        if not (self.rollouts.n and capacity > 0):
            return None
        usual, usual_s = (math.exp(value) for value in self.rollouts.mean)
        if tokens is None:
            tokens = self._tokens(questions) if questions else usual
        # Twice the tokens are seldom twice the seconds: they fill the batch, and the longest trajectory is not twice as long.
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
    """The sum of a line's predictions for these lengths of questions."""
    mean_length, mean = line.mean
    spread = max(line.xx / line.n - mean_length**2, 0.0)
    slope = line.slope(0.0, PRIOR_QUESTIONS * spread)
    # Each has at least a tenth of the mean: far from the data a line is not a prediction.
    return sum(max(mean + slope * (length - mean_length), 0.1 * mean) for length in lengths)


PRIOR_TOKENS = 0.25
"""Weight of the prior that training's seconds are proportional to a replica's tokens: as steps whose tokens differ by a
half."""


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """Seconds of an optimizer step over the tokens of one replica, as a line; newer steps count more."""

    line: TokenLine = field(default_factory=TokenLine)
    num_steps: int = 0

    def after(self, tokens: float, replicas: int, train_s: float) -> TrainingForecast:
        """The line with a step of ``tokens`` tokens on ``replicas`` replicas; a step without tokens changes nothing."""
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
