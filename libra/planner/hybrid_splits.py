"""Steps of a run with more or fewer of its hybrid workers training, by what it has measured itself, and how wrong that was. Pure.

For every number of hybrids that may train, the step is predicted as of the batch that just came: its rollout by the measured speeds
of the engines that would be left (`libra.planner.measured_step`), its training by a line through the seconds that steps took
over the
tokens of one replica. While every step had equally many tokens per replica the line goes through the origin: twice the replicas
take half the time until this run says otherwise. Which is chosen, out of more than splits, `libra.planner.arrangement_loop` says.

1. What is predicted rests on iterations that have ended. A split is judged for the batch that was, taken as what is to come.
2. At least one engine whose speed is known stays. Core trainers and workers that are not hybrid are never moved.
3. The fewest workers are moved: those that train already stay; of the others those with the fewest resident trajectories, then by
   name.

Differs from Libra (arXiv:2606.03077 v2), whose planner predicts both sides from fits made before the run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from libra.errors import PlanError
from libra.planner.measured_step import FIRST_WEIGHT, HALF_LIFE_STEPS, ExpectedStep, StepForecast, TokenLine

PRIOR_TOKENS = 0.25
"""How surely training's seconds are proportional to a replica's tokens: as surely as from steps at tokens off by a half."""
NOISE_FROM = 2
"""Steps that a prediction rests on before its error counts as noise: a run's first has allocations and first calls in it."""
WATCHED = 7
"""Iterations whose errors are the noise: enough that one or two that drift are not taken for it."""
NORMAL = 1.4826
"""Standard deviations of a normal distribution per median of its absolute values."""


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """Seconds of an optimizer step over the tokens of one replica, as a line; newer steps count more."""

    line: TokenLine = field(default_factory=TokenLine)
    num_steps: int = 0

    def after(self, tokens: float, replicas: int, train_s: float) -> TrainingForecast:
        """With a step of so many tokens on so many replicas in it; one that trained on nothing says nothing."""
        if replicas < 1 or not train_s >= 0:
            raise PlanError(
                f"a step on {replicas} replicas took {train_s} s; there is a replica, and time goes forwards"
            )
        if tokens <= 0:
            return self
        keep, weight = 0.5 ** (1.0 / HALF_LIFE_STEPS), 1.0 if self.num_steps else FIRST_WEIGHT
        return TrainingForecast(self.line.after([(tokens / replicas, train_s)], keep, weight), self.num_steps + 1)

    def expected_s(self, tokens: float, replicas: int) -> float:
        """Seconds of a step of so many tokens on so many replicas; 0 while nothing is measured."""
        if not self.line.n:
            return 0.0
        mean_tokens, mean_s = self.line.mean
        proportional = mean_s / mean_tokens
        slope = self.line.slope(proportional, PRIOR_TOKENS * self.line.n * mean_tokens**2)
        slope = min(max(slope, 0.0), proportional)  # a step costs something beside its tokens, never less than nothing
        return mean_s + slope * (tokens / replicas - mean_tokens)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A worker that may roll out or train.

    Attributes
    ----------
    name : str
    kind : str
        Of its engine, as in `StepForecast.engine_s`.
    training : bool
        Whether it trains now, or is about to.
    residents : int
        Trajectories whose KV cache its engine holds.
    """

    name: str
    kind: str
    training: bool
    residents: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """What runs: engines of workers that never change, by kind; hybrids; and core trainers."""

    engines: Mapping[str, int]
    hybrids: Sequence[Hybrid]
    core_trainers: int

    @property
    def training(self) -> int:
        """Hybrids that train."""
        return sum(hybrid.training for hybrid in self.hybrids)

    def chosen(self, num: int) -> tuple[str, ...]:
        """The hybrids that train where ``num`` do."""
        order = sorted(self.hybrids, key=lambda hybrid: (not hybrid.training, hybrid.residents, hybrid.name))
        return tuple(sorted(hybrid.name for hybrid in order[:num]))

    def engines_beside(self, training: Iterable[str]) -> Counter[str]:
        """Engines by kind, the hybrids that roll out among them."""
        apart = set(training)
        return Counter(dict(self.engines)) + Counter(h.kind for h in self.hybrids if h.name not in apart)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch that was: tokens generated for it, tokens its step was taken on."""

    generated_tokens: float
    trained_tokens: float


def gain_off(before: ExpectedStep, other: ExpectedStep, train_s: float, step_s: float, overlap: bool) -> float:
    """How wrong the gain of ``other`` over what ran was judged ``before`` an iteration, as a share of its step.

    Known afterwards are the seconds of what ran; those of the other split are taken to be as much longer than judged, phase by
    phase. So a machine that is slower in all it does changes no gain. Where steps overlap, rollout and training cannot be told
    apart, and the step's own error stands for it.
    """
    if overlap or before.rollout_s <= 0 or before.train_s <= 0:
        return abs(1.0 - before.step_s / step_s)
    rollout_s = max(step_s - train_s - before.rest_s, 0.0)
    there_s = other.rollout_s * rollout_s / before.rollout_s + other.train_s * train_s / before.train_s + before.rest_s
    return abs((1.0 - other.step_s / before.step_s) - (1.0 - there_s / step_s))


@dataclass(slots=True)
class SplitLoop:
    """What is known of a run's splits between iterations.

    Attributes
    ----------
    off : list of float
        By how much the gain of another split, as a share of the step, was judged wrong before each of the last iterations.
    """

    trainings: TrainingForecast = field(default_factory=TrainingForecast)
    off: list[float] = field(default_factory=list)

    def expected(
        self, forecast: StepForecast, fleet: MeasuredFleet, batch: Batch, num: int, overlap: bool
    ) -> ExpectedStep | None:
        """The step of this batch where ``num`` hybrids train; None where no engine is left whose speed is known."""
        engines = fleet.engines_beside(fleet.chosen(num))
        found = forecast.expected(engines, None, overlap, tokens=batch.generated_tokens)
        if found is None:
            return None
        train_s = self.trainings.expected_s(batch.trained_tokens, fleet.core_trainers + num)
        waits_s = train_s + found.rest_s
        step_s = max(found.rollout_s, waits_s) if overlap else found.rollout_s + waits_s
        return ExpectedStep(found.tokens, found.rollout_s, train_s, found.rest_s, step_s)

    def learn(
        self,
        forecast: StepForecast,
        fleet: MeasuredFleet,
        batch: Batch,
        replicas: int,
        train_s: float,
        step_s: float,
        overlap: bool,
    ) -> None:
        """Hear of an iteration that was run by ``fleet``: its step on so many replicas, and from end to end.

        ``forecast`` is what was known before it, and is judged by what came, told the batch's tokens.
        """
        before = self.expected(forecast, fleet, batch, fleet.training, overlap)
        if before is not None and before.step_s > 0 and self.trainings.num_steps >= NOISE_FROM:
            others = [
                self.expected(forecast, fleet, batch, num, overlap)
                for num in range(len(fleet.hybrids) + 1)
                if num != fleet.training
            ]
            found = [gain_off(before, other, train_s, step_s, overlap) for other in others if other is not None]
            self.off = [*self.off, max(found, default=0.0)][-WATCHED:]
        self.trainings = self.trainings.after(batch.trained_tokens, replicas, train_s)

    @property
    def noise_frac(self) -> float:
        """What judged gains are off by, in most iterations; 0 while nothing is known.

        A median: the iteration in which a workload changes is judged wrong by far, and what comes after it is not.
        """
        return NORMAL * statistics.median(self.off) if self.off else 0.0
