"""The decision, after each iteration, whether a better arrangement is worth its change. Pure.

Options are trainers x engines of two workers x slots, predicted for the last batch by
`libra.planner.arrangement_forecast`. Deviates from Libra's code, which compares an assumed cost
with one iteration's gain and has a cooldown of one iteration. The memory rule follows EARL
(arXiv:2510.05943, parallelism selector), whose table depends on context length alone; here
concurrency counts too.

1. An option that would run out of KV is never chosen; if the present arrangement would in the first
   iteration that a change can affect, it is replaced at once, whatever gain and cost.
2. Otherwise an option is accepted only if its gain over the remaining iterations exceeds
   ``cost_factor`` times the mean measured cost of such changes, and its gain per step exceeds
   ``least_gain_frac``.
3. An option must win ``confirmations`` comparisons in a row, ``rest_iterations`` after the last
   change, so that n iterations have at most 1 + n / max(confirmations, rest) changes.
4. Every comparison is recorded as `libra.facts.PlanConsidered`, and useful but impossible changes
   in `SplitDecision.blocked`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from libra.facts import Fact, PlanAccepted, PlanConsidered
from libra.planner.arrangement_forecast import (
    MAX_DEMAND,
    ArrangementForecast,
    ArrangementScore,
    EndedIteration,
    RunFacts,
)
from libra.planner.arrangements import ROLES, SLOTS, Arrangement, Deployed, arrangements, blocked, kinds_of_change
from libra.planner.cost import TrajectoryTotals
from libra.planner.step_forecast import ExpectedStep, StepForecast, TrainingForecast

RAISED_DEMAND = 0.75
"""Maximum KV share of an engine after a slot increase; below `MAX_DEMAND` for hysteresis."""
WATCHED = 8
"""Iterations whose mean contexts give the trend."""
MIXED_MARGIN_FRAC = 0.25
"""Extra gain, as a share of a step, required of engines with mixed TP degrees.

Predictions place trajectories by known lengths, which a run does not have; with equal engines that
costs nothing.
"""


@dataclass(slots=True)
class Replanner:
    """Compares layouts with the present one; keeps costs of changes and the winning streak.

    ``first_cost_s`` is assumed until a change of its kind was measured: 10.8 s from training to
    rollout and 8.0 s back (Libra, arXiv:2606.03077 v2); a first change of slots costs nothing.
    ``least_gain_frac`` is the least gain per step, as its share; ``cost_factor`` the least gain
    over the remaining iterations, as a multiple of the cost.
    """

    first_cost_s: float = 18.8
    least_gain_frac: float = 0.05
    cost_factor: float = 1.5
    confirmations: int = 2
    rest_iterations: int = 3
    costs_s: dict[str, list[float]] = field(default_factory=dict)
    confirmed: int = 0
    last_change: int | None = None

    def cost_s(self, kinds: Collection[str] = (ROLES,)) -> float:
        """Expected seconds of a change: for each kind the mean past cost, or the assumption."""
        assumed = {SLOTS: 0.0}
        return sum(
            statistics.fmean(self.costs_s[kind]) if self.costs_s.get(kind) else assumed.get(kind, self.first_cost_s)
            for kind in kinds
        )

    def changed(self, cost_s: float, kind: str = ROLES) -> None:
        """Record the cost of the last accepted change of a kind, in seconds."""
        self.costs_s.setdefault(kind, []).append(cost_s)

    def weigh(
        self, iteration: int, current_step_s: float, wanted: Deployed, step_s: float, remaining: int, *,
        kinds: Collection[str], decisive: str = "",
    ) -> PlanConsidered:  # fmt: skip
        """Compare a layout with the present one; iterations rise from call to call.

        One model must predict both steps. Empty ``kinds`` means the present layout. A ``decisive``
        reason accepts the layout whatever gain and cost. The caller adds the iteration's seconds
        and contexts.
        """
        cost_s = self.cost_s(kinds or (ROLES,))
        gain_s = (current_step_s - step_s) * remaining
        gain_frac = 1.0 - step_s / current_step_s if current_step_s > 0 else 0.0
        since = None if self.last_change is None else iteration - self.last_change
        worth = bool(kinds) and gain_frac > self.least_gain_frac and gain_s > self.cost_factor * cost_s
        self.confirmed = self.confirmed + 1 if worth else 0
        resting = since is not None and since <= self.rest_iterations
        accepted = bool(decisive) or (worth and self.confirmed >= self.confirmations and not resting)
        gains = f"gains {gain_s:.1f} s over {remaining} iterations"
        refusals = {
            "this is what runs": not kinds,
            f"gains {100 * gain_frac:.1f} % of a step, {100 * self.least_gain_frac:.1f} % are required": (
                gain_frac <= self.least_gain_frac
            ),
            f"{gains}, {self.cost_factor:g} times the cost of {cost_s:.1f} s are required": not worth,
            f"the last change was {since} iterations ago, {self.rest_iterations} must pass": resting,
            f"found {self.confirmed} times in a row, {self.confirmations} are required": not accepted,
        }
        refusal = next((reason for reason, holds in refusals.items() if holds), "")
        reason = decisive or (f"{gains} for {cost_s:.1f} s" if accepted else refusal)
        if accepted:
            self.last_change, self.confirmed = iteration, 0
        return PlanConsidered(
            iteration=iteration, predicted_step_s=None, realised_step_s=0.0, current_step_s=current_step_s,
            proposed_step_s=step_s, gain_s=gain_s, cost_s=cost_s,
            num_changes=sum(len(self.costs_s.get(kind, ())) for kind in kinds or (ROLES,)),
            remaining_iterations=remaining, train_gpus=wanted.train_gpus,
            engines=tuple(sorted(wanted.engines.items())), accepted=accepted, reason=reason,
            concurrency=tuple(sorted(wanted.concurrency.items())),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContextTrend:
    """Linear trend of the mean context at the end of recent iterations' trajectories."""

    means: tuple[tuple[int, float], ...] = ()

    def after(self, iteration: int, mean_tokens: float) -> ContextTrend:
        """The trend with one more iteration."""
        return ContextTrend((*self.means, (iteration, mean_tokens))[-WATCHED:])

    def expected(self, iteration: int) -> float:
        """Expected mean context of a later iteration, never below the last one; 0 if unknown."""
        if not self.means:
            return 0.0
        last = self.means[-1][1]
        if len(self.means) < 2:
            return last
        at, mean = (np.array(column, float) for column in zip(*self.means, strict=True))
        slope, level = np.polyfit(at - at.mean(), mean, 1)
        return max(last, float(level + slope * (iteration - at.mean())))


def oom_safe(now: ArrangementScore, options: Sequence[ArrangementScore]) -> ArrangementScore | None:
    """The option that avoids running out of KV; None if ``now`` is safe, or no option needs less.

    The fastest option below `MAX_DEMAND`; without one, the option with the least demand.
    """
    if now.kv_demand <= MAX_DEMAND:
        return None
    safe = [option for option in options if option.kv_demand <= MAX_DEMAND]
    if safe:
        return min(safe, key=lambda option: option.step_s)
    least = min(options, key=lambda option: (option.kv_demand, option.step_s), default=now)
    return least if least.kv_demand < now.kv_demand else None


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """Decision after an iteration; without a change, ``chosen`` is ``now`` and ``kinds`` empty."""

    considered: PlanConsidered  # without the iteration's seconds and contexts
    now: ArrangementScore
    chosen: ArrangementScore
    context_tokens: float  # expected mean for the first iteration that this decision can affect
    kinds: tuple[str, ...]
    boundaries_tokens: Mapping[str, float]  # by degree, without the largest; empty if undefined
    blocked: tuple[tuple[ArrangementScore, float], ...]  # impossible options, with their gain

    def facts(self, predicted_step_s: float | None, realised_step_s: float) -> tuple[Fact, ...]:
        """``plan_considered`` and, if accepted, ``plan_accepted``.

        ``predicted_step_s`` is the earlier prediction for the iteration that took
        ``realised_step_s``, or None.
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
        )  # fmt: skip
        return (considered, accepted)


@dataclass(slots=True)
class ArrangementLoop:
    """State of replanning between iterations."""

    run: RunFacts
    replanner: Replanner = field(default_factory=Replanner)
    trainings: TrainingForecast = field(default_factory=TrainingForecast)
    trend: ContextTrend = field(default_factory=ContextTrend)

    def learn(self, ended: EndedIteration, replicas: int, train_s: float) -> None:
        """Record the optimizer step of an iteration on ``replicas`` replicas."""
        self.trainings = self.trainings.after(ended.batch.trained_tokens, replicas, train_s)

    def learn_contexts(self, iteration: int, lengths: TrajectoryTotals | None) -> None:
        """Record the final contexts of an iteration."""
        if lengths is not None:
            self.trend = self.trend.after(iteration, float(lengths.final_context_tokens.mean()))

    def weigh(self, forecast: StepForecast, ended: EndedIteration) -> SplitDecision | None:
        """Compare all arrangements with the present one; None while its step is unpredictable.

        ``forecast`` includes the ended iteration. If KV memory decides, measured step time replaces
        a missing prediction.
        """
        context = self.expected_context(ended.iteration)
        judge = ArrangementForecast(self.run, ended, forecast, self.trainings, context)
        present = judge.now
        if not present.engines:
            return None
        now = judge.score(present)
        options = [judge.score(option) for option in judge.with_slots(arrangements(ended.seats, self.run.may_have))]
        best, decisive = self._best(now, options, context, ended.iteration)
        if now.expected is None and not decisive:
            return None
        kinds = kinds_of_change(present, best.arrangement)
        now_s = now.expected.step_s if now.expected is not None else ended.step_s
        best_s = best.expected.step_s if best.expected is not None else now_s
        wanted = best.arrangement.deployed(self.run.core_trainers)
        considered = self.replanner.weigh(
            ended.iteration, now_s, wanted, best_s, ended.remaining, kinds=kinds, decisive=decisive
        )
        if considered.accepted and best.basis:
            considered = replace(considered, reason=f"{considered.reason}; {best.basis}")
        impossible = tuple(self._impossible(judge, now, best))
        chosen, kinds = (best, kinds) if considered.accepted else (now, ())
        return SplitDecision(considered, now, chosen, context, kinds, judge.boundaries(chosen.arrangement), impossible)

    def expected(self, forecast: StepForecast, ended: EndedIteration, option: Arrangement) -> ExpectedStep | None:
        """Predicted step of the batch in an arrangement of the present workers, or None."""
        names = {seat.name for seat in ended.seats}
        if not {name for engine in option.engines for name in engine.workers} <= names:
            return None  # a worker of this arrangement has left
        context = float(ended.lengths.final_context_tokens.mean()) if ended.lengths is not None else 0.0
        return ArrangementForecast(self.run, ended, forecast, self.trainings, context).expected(option)

    def expected_context(self, iteration: int) -> float:
        """Mean context of the last iteration that may start before a change takes effect."""
        return min(self.trend.expected(iteration + 2 + self.run.overlap_steps), float(self.run.max_context_tokens))

    def _best(
        self, now: ArrangementScore, options: Sequence[ArrangementScore], context: float, iteration: int
    ) -> tuple[ArrangementScore, str]:
        """The option to compare, and the reason to accept it whatever its gain (empty: none)."""
        if (safe := oom_safe(now, options)) is not None:
            return safe, (
                f"KV memory: {now.arrangement.shown} would need {now.kv_demand:.2f} of its KV at the {context:,.0f} tokens of "
                f"context expected in iteration {iteration + 2 + self.run.overlap_steps}; {safe.arrangement.shown} "
                f"needs {safe.kv_demand:.2f}"
            )
        most = max(RAISED_DEMAND, now.kv_demand)
        known = [option for option in options if option.expected is not None and option.kv_demand <= most]

        def rank(option: ArrangementScore) -> tuple[float, int]:
            mixed = len({engine.tp for engine in option.arrangement.engines}) > 1
            stays = option.arrangement.engines == now.arrangement.engines
            margin = 1.0 if stays or not mixed else 1.0 / (1.0 - MIXED_MARGIN_FRAC)
            return margin * option.step_s, len(kinds_of_change(now.arrangement, option.arrangement))

        best = min(known, key=rank, default=now)
        return (best if now.expected is None or best.step_s < now.step_s else now), ""

    def _impossible(
        self, judge: ArrangementForecast, now: ArrangementScore, best: ArrangementScore
    ) -> Iterator[tuple[ArrangementScore, float]]:
        """Blocked options that gain clearly more than the best one, or fit where it does not."""
        for option in map(judge.score, blocked(judge.ended.seats, self.run.may_have)):
            helps = best.kv_demand > MAX_DEMAND and option.kv_demand < best.kv_demand
            known = now.expected is not None and option.expected is not None
            gain = (best.step_s - option.step_s) / now.step_s if known else 0.0
            never = any(
                self.run.may_have(judge.seats[engine.workers[0]].engine, engine.tp)
                for engine in option.arrangement.engines
            )
            pays = gain > self.replanner.least_gain_frac and option.kv_demand <= MAX_DEMAND and not never
            if helps or pays:
                yield option, gain
