"""Chooses the arrangement of a run's workers after each iteration, from this run's own measurements. Pure.

Options are (hybrids that train) x (engines of two workers of a node) x (slots), `libra.planner.arrangements`. Each is predicted for
the last batch (`libra.planner.arrangement_forecast`).

1. An option that would run out of KV memory is not chosen. If the present arrangement would, in an iteration that a change
   can still affect, it is replaced at once, regardless of gain and cost (EARL's rule, `libra.planner.kv_memory.refuge`).
2. Else the fastest option is compared by `libra.planner.replan`, hysteresis and prices included.
3. A change that would pay off but is not possible is named (`SplitDecision.blocked`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from libra.facts import Fact, PlanAccepted, PlanConsidered
from libra.planner.arrangement_forecast import ArrangementForecast, ArrangementScore, EndedIteration
from libra.planner.arrangements import (
    Arrangement,
    arrangements,
    blocked,
    kinds_of_change,
    splits_of,
)
from libra.planner.cost import TrajectoryTotals
from libra.planner.kv_memory import MAX_DEMAND, RAISED_DEMAND, ContextTrend, refuge
from libra.planner.measured_step import ExpectedStep, StepForecast
from libra.planner.replan import Command, Proposal, Replanner, Rules
from libra.planner.run_facts import RunFacts
from libra.planner.split_forecast import SplitForecast

MIXED_MARGIN_FRAC = 0.25
"""Share of a step that engines of several TP degrees must gain over engines of one degree.

A prediction places trajectories by lengths that it knows; a run places them before it knows the lengths, which costs
nothing if engines are alike. On Qwen3-14B and 24 A800 GPUs simulated under C-MLFQ, mixed layouts took 1.3 to 1.6 times what
was planned, those of one degree 1.02 to 1.08 times."""


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """What was decided after an iteration.

    Attributes
    ----------
    considered : PlanConsidered
        Without the seconds of the iteration and its contexts.
    orders : tuple of Command
        The commands that carry it out; empty if it was not accepted.
    now, chosen : ArrangementScore
        The present arrangement and the chosen one: equal if nothing was accepted.
    context_tokens : float
        Mean context expected of the first iteration that a change made now can affect.
    kinds : tuple of str
        Of the change; empty if nothing was accepted.
    boundaries_tokens : mapping of "tp1", "tp2", ... to tokens
        Boundary of each degree of the chosen arrangement except the largest; empty: it has one degree, or lengths are
        unknown.
    blocked : tuple of (ArrangementScore, gain as a share of the step)
        Arrangements that would pay off and are not possible.
    """

    considered: PlanConsidered
    orders: tuple[Command, ...]
    now: ArrangementScore
    chosen: ArrangementScore
    context_tokens: float
    kinds: tuple[str, ...]
    boundaries_tokens: Mapping[str, float]
    blocked: tuple[tuple[ArrangementScore, float], ...]

    def facts(self, predicted_step_s: float | None, realised_step_s: float) -> tuple[Fact, ...]:
        """``plan_considered`` and, if accepted, ``plan_accepted``.

        ``predicted_step_s`` was predicted before the iteration that took ``realised_step_s``; None: nothing was.
        """
        considered = replace(
            self.considered, predicted_step_s=predicted_step_s, realised_step_s=realised_step_s,
            context_tokens=self.context_tokens, kv_demand=self.now.kv_demand,
        )  # fmt: skip
        if not considered.accepted:
            return (considered,)
        accepted = PlanAccepted(
            considered.iteration, considered.train_gpus, considered.engines, concurrency=considered.concurrency,
            boundaries_tokens=tuple(self.boundaries_tokens.values()),
            commands=tuple((type(command).__name__, str(command)) for command in self.orders),
        )  # fmt: skip
        return (considered, accepted)


@dataclass(slots=True)
class ArrangementLoop:
    """The state of replanning between iterations."""

    run: RunFacts
    rules: Rules = field(default_factory=Rules)
    splits: SplitForecast = field(default_factory=SplitForecast)
    trend: ContextTrend = field(default_factory=ContextTrend)
    replanner: Replanner | None = None

    def learn(self, before: StepForecast, ended: EndedIteration, replicas: int, train_s: float) -> None:
        """Learn from an iteration with these seats from end to end; ``before`` is the forecast without it."""
        splits = splits_of(ended.seats, self.run.core_trainers)
        self.splits.learn(before, splits, ended.batch, replicas, train_s, ended.step_s, ended.overlap)

    def learn_contexts(self, iteration: int, lengths: TrajectoryTotals | None) -> None:
        """Learn the contexts that an iteration reached."""
        if lengths is not None:
            self.trend = self.trend.after(iteration, float(lengths.final_context_tokens.mean()))

    def weigh(self, forecast: StepForecast, ended: EndedIteration) -> SplitDecision | None:
        """Compare every other arrangement with the present one; None while the present one's step cannot be predicted.

        ``forecast`` has the iteration that ended. If memory decides, its seconds replace a step that cannot be predicted
        yet.
        """
        context = self.expected_context(ended.iteration)
        judge = ArrangementForecast(self.run, ended, forecast, self.splits.trainings, context)
        present = judge.now
        if not present.engines:
            return None
        now = judge.score(present)
        options = [judge.score(option) for option in judge.with_slots(arrangements(ended.seats, self.run.may_have))]
        deployed = present.deployed(self.run.core_trainers)
        self.replanner = self.replanner or Replanner(deployed, self.rules)
        self.replanner.deployed = deployed
        best, decisive = self._best(now, options, context, ended.iteration)
        if now.expected is None and not decisive:
            return None
        kinds = kinds_of_change(present, best.arrangement)
        now_s = now.expected.step_s if now.expected is not None else ended.step_s
        best_s = best.expected.step_s if best.expected is not None else now_s
        proposal = Proposal(best.arrangement.deployed(self.run.core_trainers), best_s, kinds, decisive)
        considered = self.replanner.weigh(ended.iteration, now_s, proposal, ended.remaining, self.splits.noise_frac)
        if considered.accepted and best.basis:
            considered = replace(considered, reason=f"{considered.reason}; {best.basis}")
        impossible = tuple(self._impossible(judge, now, best, considered.required_gain_frac))
        chosen, kinds = (best, kinds) if considered.accepted else (now, ())
        boundaries = judge.boundaries(chosen.arrangement)
        return SplitDecision(considered, self.replanner.orders, now, chosen, context, kinds, boundaries, impossible)

    def expected(self, forecast: StepForecast, ended: EndedIteration, option: Arrangement) -> ExpectedStep | None:
        """The step of the batch in an arrangement, from the present facts about the seats; None if it cannot be
        predicted."""
        names = {seat.name for seat in ended.seats}
        if not {name for engine in option.engines for name in engine.workers} <= names:
            return None  # one of its workers has left
        context = float(ended.lengths.final_context_tokens.mean()) if ended.lengths is not None else 0.0
        return ArrangementForecast(self.run, ended, forecast, self.splits.trainings, context).expected(option)

    def expected_context(self, iteration: int) -> float:
        """Mean context of the last iteration that may begin before a change made after ``iteration`` takes hold."""
        return min(self.trend.expected(iteration + 2 + self.run.overlap_steps), float(self.run.max_context_tokens))

    def _best(
        self, now: ArrangementScore, options: Sequence[ArrangementScore], context: float, iteration: int
    ) -> tuple[ArrangementScore, str]:
        """The option to compare, and the reason to accept it regardless of gain; empty: there is none."""
        found = refuge(now.fit, [option.fit for option in options])
        if found is not None:
            best = options[found]
            reason = (
                f"KV memory: {now.arrangement.shown} would need {now.kv_demand:.2f} of its KV at the {context:,.0f} tokens of "
                f"context expected in iteration {iteration + 2 + self.run.overlap_steps}; {best.arrangement.shown} "
                f"needs {best.kv_demand:.2f}"
            )
            return best, reason
        most = max(RAISED_DEMAND, now.kv_demand)
        known = [option for option in options if option.expected is not None and option.kv_demand <= most]

        def rank(option: ArrangementScore) -> tuple[float, int]:
            mixed = len({engine.tp for engine in option.arrangement.engines}) > 1
            stays = option.arrangement.engines == now.arrangement.engines
            margin = 1.0 if stays or not mixed else 1.0 / (1.0 - MIXED_MARGIN_FRAC)
            return margin * option.fit.slowness, len(kinds_of_change(now.arrangement, option.arrangement))

        best = min(known, key=rank, default=now)
        return (best, "") if now.expected is None or best.fit.slowness < now.fit.slowness else (now, "")

    def _impossible(
        self, judge: ArrangementForecast, now: ArrangementScore, best: ArrangementScore, required: float
    ) -> Iterator[tuple[ArrangementScore, float]]:
        """Blocked arrangements that gain more than required over the best possible one, or hold contexts that it does not."""
        for option in map(judge.score, blocked(judge.ended.seats, self.run.may_have)):
            helps = best.kv_demand > MAX_DEMAND and option.kv_demand < best.kv_demand
            if now.expected is None or option.expected is None:
                gain = 0.0
            else:
                gain = (best.fit.slowness - option.fit.slowness) / now.expected.step_s
            never = any(
                self.run.may_have(judge.seats[engine.workers[0]].engine, engine.tp)
                for engine in option.arrangement.engines
            )
            if helps or (gain > required and option.kv_demand <= MAX_DEMAND and not never):
                yield option, gain
