"""Whether the gain of a better arrangement exceeds the cost of the change, after each iteration, from
this run's own measurements: a pure decision with all its numbers, and bounded flapping.

Options are (hybrids that train) x (engines of two workers of a node) x (slots), each predicted for the
last batch (`libra.planner.arrangement_forecast`).

1. An option that would run out of KV memory is not chosen. If the present arrangement would, in an
   iteration that a change can still affect, it is replaced at once, regardless of gain and cost.
2. Else an option is accepted only if its gain over the remaining iterations exceeds the mean measured
   cost of past changes by ``cost_factor``, and its gain per step exceeds ``least_gain_frac``.
3. It must win ``confirmations`` comparisons in a row, and ``rest_iterations`` must have passed since the
   last change: in n iterations at most 1 + n / max(confirmations, rest) changes, however the metrics change.
4. Every comparison is a `libra.facts.PlanConsidered`, accepted or not. A change that would pay off but
   is not possible is named (`SplitDecision.blocked`). No clock, no I/O.

Differs from the published code of Libra, which compares the cost of a change with one iteration's gain,
assumes that cost instead of measuring it, and has a cooldown of one iteration. The memory rule is that
of EARL (arXiv:2510.05943, the parallelism selector), which looks rates up in a table measured before the
run and chooses a degree by context length alone; here concurrency counts as much as length.
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
"""Share up to which an engine may get more slots; below `MAX_DEMAND` (hysteresis)."""
WATCHED = 8
"""Number of iterations whose mean contexts give the trend."""
MIXED_MARGIN_FRAC = 0.25
"""Share of a step that engines of several TP degrees must gain over engines of one degree.

A prediction places trajectories by lengths that it knows; a run places them before it knows the lengths,
which costs nothing if engines are alike."""


@dataclass(slots=True)
class Replanner:
    """Compares layouts with the present one; keeps the cost of changes and how often an option has won.

    ``first_cost_s`` is assumed until a change of a kind was measured: 10.8 s from training to rollout and 8.0 s back (Libra,
    arXiv:2606.03077 v2); the first change of slots is assumed to cost nothing. ``least_gain_frac`` is the least gain per step, as a
    share of it, ``cost_factor`` the least gain over the remaining iterations, as a multiple of the cost.
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
        """Expected cost of a change of these kinds: for each the mean of past ones, or the assumption for the first."""
        assumed = {SLOTS: 0.0}
        return sum(
            statistics.fmean(self.costs_s[kind]) if self.costs_s.get(kind) else assumed.get(kind, self.first_cost_s)
            for kind in kinds
        )

    def changed(self, cost_s: float, kind: str = ROLES) -> None:
        """Record what the last accepted change of a kind cost, in seconds of the run."""
        self.costs_s.setdefault(kind, []).append(cost_s)

    def weigh(
        self, iteration: int, current_step_s: float, wanted: Deployed, step_s: float, remaining: int, *,
        kinds: Collection[str], decisive: str = "",
    ) -> PlanConsidered:  # fmt: skip
        """Compare a layout with the present one; iterations rise from call to call.

        Both steps are predicted by one model. Without ``kinds`` of change it is the present layout. A ``decisive`` reason
        accepts it regardless of gain and cost. The caller adds the seconds of the iteration, and its contexts.
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
    """Mean context at the end of an iteration's trajectories, extrapolated by a line through the last ones."""

    means: tuple[tuple[int, float], ...] = ()

    def after(self, iteration: int, mean_tokens: float) -> ContextTrend:
        """The trend with one more iteration."""
        return ContextTrend((*self.means, (iteration, mean_tokens))[-WATCHED:])

    def expected(self, iteration: int) -> float:
        """Mean context expected of a later iteration, never less than the last one; 0: unknown."""
        if not self.means:
            return 0.0
        last = self.means[-1][1]
        if len(self.means) < 2:
            return last
        at, mean = (np.array(column, float) for column in zip(*self.means, strict=True))
        slope, level = np.polyfit(at - at.mean(), mean, 1)
        return max(last, float(level + slope * (iteration - at.mean())))


def oom_safe(now: ArrangementScore, options: Sequence[ArrangementScore]) -> ArrangementScore | None:
    """The option to change to because ``now`` would run out of memory; None if it would not, or none needs less.

    The fastest below `MAX_DEMAND`; if there is none, the one with the least demand.
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
    """A decision after an iteration; if nothing was accepted, ``chosen`` equals ``now`` and ``kinds`` is empty."""

    considered: PlanConsidered  # without the seconds of the iteration and its contexts
    now: ArrangementScore
    chosen: ArrangementScore
    context_tokens: float  # mean expected of the first iteration that a change made now can affect
    kinds: tuple[str, ...]
    boundaries_tokens: Mapping[str, float]  # of each degree except the largest; empty for one, or unknown lengths
    blocked: tuple[tuple[ArrangementScore, float], ...]  # not possible, with the share of the step that they would gain

    def facts(self, predicted_step_s: float | None, realised_step_s: float) -> tuple[Fact, ...]:
        """``plan_considered`` and, if accepted, ``plan_accepted``.

        ``predicted_step_s`` was predicted before the iteration that took ``realised_step_s`` (None without a prediction).
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
    """The state of replanning between iterations."""

    run: RunFacts
    replanner: Replanner = field(default_factory=Replanner)
    trainings: TrainingForecast = field(default_factory=TrainingForecast)
    trend: ContextTrend = field(default_factory=ContextTrend)

    def learn(self, ended: EndedIteration, replicas: int, train_s: float) -> None:
        """Learn from the optimizer step of an iteration on ``replicas`` replicas."""
        self.trainings = self.trainings.after(ended.batch.trained_tokens, replicas, train_s)

    def learn_contexts(self, iteration: int, lengths: TrajectoryTotals | None) -> None:
        """Learn the contexts that an iteration reached."""
        if lengths is not None:
            self.trend = self.trend.after(iteration, float(lengths.final_context_tokens.mean()))

    def weigh(self, forecast: StepForecast, ended: EndedIteration) -> SplitDecision | None:
        """Compare every other arrangement with the present one; None while the present one's step cannot be predicted.

        ``forecast`` has the iteration that ended. If memory decides, its seconds replace a step that cannot
        be predicted yet.
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
        """The step of the batch in an arrangement, from the present facts about the workers; None if it cannot be
        predicted."""
        names = {seat.name for seat in ended.seats}
        if not {name for engine in option.engines for name in engine.workers} <= names:
            return None  # one of its workers has left
        context = float(ended.lengths.final_context_tokens.mean()) if ended.lengths is not None else 0.0
        return ArrangementForecast(self.run, ended, forecast, self.trainings, context).expected(option)

    def expected_context(self, iteration: int) -> float:
        """Mean context of the last iteration that may begin before a change made after ``iteration`` takes hold."""
        return min(self.trend.expected(iteration + 2 + self.run.overlap_steps), float(self.run.max_context_tokens))

    def _best(
        self, now: ArrangementScore, options: Sequence[ArrangementScore], context: float, iteration: int
    ) -> tuple[ArrangementScore, str]:
        """The option to compare, and the reason to accept it regardless of gain; empty: there is none."""
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
        """Blocked arrangements that gain more than required over the best possible one, or hold contexts that it does not."""
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
