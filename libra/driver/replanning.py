"""Replanning: after each iteration, choose an arrangement of the run's workers, and request the changes that lead to it.

1. A change is requested once, between iterations, and the run does not wait for it. While one is under way, no other is requested.
2. The present arrangement is the one that the scheduler reports (``libra_roles``, ``libra_engines``), never the one
   requested, so that a change that failed or was undone is seen.
3. Slots are limited before roles change: an engine that is to start with fewer has its limit before it starts.
4. Every plan considered is in the event log, accepted or not (``plan_considered``). A plan that would pay off but is
   impossible is logged once, with what is missing (``plan_blocked``). A change that was carried out is followed by
   ``plan_realised``, with its gain and cost, after the first iteration that began and ended with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.facts import PlanBlocked, PlanRealised
from libra.planner.arrangement_forecast import ArrangementScore, EndedIteration
from libra.planner.arrangements import (
    REBUCKET,
    ROLES,
    SLOTS,
    Arrangement,
    Assignments,
    Seat,
    arranged,
    limits_for,
    steps_to,
)
from libra.planner.replan import ArrangementLoop, SplitDecision
from libra.planner.step_forecast import Batch, StepForecast

if TYPE_CHECKING:
    from libra.driver.run_client import RunClient

logger = logging.getLogger(__name__)

BOUNDARY_MOVES = math.sqrt(2.0)
"""New boundaries are set when one would move by more than this factor: a length class, the resolution of forecasts."""


@dataclass(slots=True)
class RequestedChange:
    """A change under way. ``requested``: its role changes by generation; ``limit_s``: seconds to limit slots, if it did."""

    iteration: int
    predicted_gain_frac: float
    before: Arrangement
    steps: list[list[Assignments]]
    requested: dict[int, Assignments] = field(default_factory=dict)
    limit_s: float | None = None


class Replanning:
    """The arrangement of one run's workers, followed iteration by iteration.

    ``apply``: accepted plans are carried out. ``boundaries``: the bucket boundaries at the start.
    """

    def __init__(
        self,
        scheduler: RunClient,
        loop: ArrangementLoop,
        *,
        apply: bool = True,
        boundaries: Mapping[str, float] | None = None,
    ) -> None:
        self._scheduler, self.loop, self._apply = scheduler, loop, apply
        self._boundaries = dict(boundaries or {})
        self._change: RequestedChange | None = None
        self._began_with: Arrangement | None = None  # the arrangement that the current iteration began with
        self._blocked: set[str] = set()  # what was logged as missing

    def begin(self, contexts: Sequence[tuple[int, float]], seats: Collection[Seat]) -> None:
        """Free KV memory for the upcoming contexts, extrapolated from (iteration, mean final context) of earlier starts."""
        for iteration, mean_tokens in contexts:
            self.loop.trend = self.loop.trend.after(iteration, mean_tokens)
        last = contexts[-1][0]
        decision = self.loop.weigh(StepForecast(), EndedIteration(last, seats, Batch(0.0, 0.0), None, 0.0, 1, False))
        if decision is not None:
            self._log(last, decision, 0.0, None)
            if decision.kinds and self._apply:
                self._request(last, decision, seats)

    def after(
        self,
        ended: EndedIteration,
        values: Mapping[str, Any],
        forecast: StepForecast,
        predicted_step_s: float | None = None,
    ) -> SplitDecision | None:
        """Learn from an iteration, compare a change with its predicted gain, weigh the options, and request a change.

        ``values``: the iteration's numbers; ``forecast`` includes it; ``predicted_step_s`` is the earlier prediction.
        """
        now = arranged(ended.seats)
        whole = self._began_with == now
        if whole:
            replicas = self.loop.run.core_trainers + int(values.get("hybrids", 0))
            self.loop.learn(ended, replicas, float(values.get("train_s", 0.0)))
        self.loop.learn_contexts(ended.iteration, ended.lengths)
        self._began_with = now
        if self._change is not None:
            self._follow(self._change, ended, forecast, whole=whole)
        if self._change is not None:
            return None
        decision = self.loop.weigh(forecast, ended)
        if decision is not None:
            self._log(ended.iteration, decision, ended.step_s, predicted_step_s)
            if decision.kinds and self._apply:
                self._request(ended.iteration, decision, ended.seats)
            if self._apply:
                self._set_boundaries(decision)
        return decision

    def _log(
        self, iteration: int, decision: SplitDecision, realised_step_s: float, predicted_step_s: float | None
    ) -> None:
        self._scheduler.tell(*decision.facts(predicted_step_s, realised_step_s))
        for option, gain_frac in decision.blocked:
            missing = option.arrangement.missing
            if missing not in self._blocked:
                self._blocked.add(missing)
                self._log_blocked(iteration, option, gain_frac, missing)
                logger.warning("a plan that gains %.1f %% of a step is impossible: %s", 100 * gain_frac, missing)

    def _log_blocked(self, iteration: int, option: ArrangementScore, gain_frac: float, missing: str) -> None:
        wanted = option.arrangement.deployed(self.loop.run.core_trainers)
        engines, slots = tuple(sorted(wanted.engines.items())), tuple(sorted(wanted.concurrency.items()))
        self._scheduler.tell(
            PlanBlocked(iteration, missing, gain_frac, option.kv_demand, wanted.train_gpus, engines, slots)
        )

    def _request(self, iteration: int, decision: SplitDecision, seats: Collection[Seat]) -> None:
        now, wanted, considered = decision.now.arrangement, decision.chosen.arrangement, decision.considered
        steps = steps_to(now, wanted, {seat.name: seat.tp for seat in seats})
        change = RequestedChange(iteration, considered.gain_frac, now, steps)
        try:
            if limits := limits_for(now, wanted):
                began_s = time.perf_counter()
                self._scheduler.limit_slots(limits, considered.reason)
                change.limit_s = time.perf_counter() - began_s if SLOTS in decision.kinds else None
            self._next_step(change)
        except ClusterError as error:  # another caller changes roles, or a worker has just left: the next plan sees it
            logger.warning("the plan of iteration %d is not carried out: %s", iteration, error)
            self._log_blocked(iteration, decision.chosen, considered.gain_frac, str(error))
            return
        self._change = change
        logger.info(
            "%s: %s, instead of %s (changes %s)",
            considered.reason, wanted.shown, now.shown, sorted(change.requested) or "of slots only",
        )  # fmt: skip

    def _next_step(self, change: RequestedChange) -> None:
        for assignments in change.steps.pop(0) if change.steps else []:
            change.requested[self._scheduler.change_roles(assignments)] = assignments

    def _set_boundaries(self, decision: SplitDecision) -> None:
        wanted, has = dict(decision.boundaries_tokens), self._boundaries
        if not wanted or (wanted.keys() == has.keys() and all(_near(wanted[tp], has[tp]) for tp in wanted)):
            return
        self._scheduler.set_boundaries(wanted, "a plan: lengths by what engines of each degree generate")
        self._boundaries = wanted

    def _follow(self, change: RequestedChange, ended: EndedIteration, forecast: StepForecast, *, whole: bool) -> None:
        rows = self._scheduler.roles()
        now = {str(row["worker"]): row for row in rows}
        targets = {name: has for assignments in change.requested.values() for name, has in assignments.items()}
        stages = {now[name]["stage"] for name in targets if name in now}
        if not stages <= {"resupplied", "failed"}:
            return
        if "failed" in stages or any(name not in now or not _is(now[name], has) for name, has in targets.items()):
            logger.warning("changes %s failed or were undone; see role_change_failed", sorted(change.requested))
            self._change = None
            return
        if change.steps:
            try:
                self._next_step(change)
            except ClusterError as error:
                logger.warning("a plan is carried out in part: %s", error)
                self._change = None
            return
        if (
            whole
        ):  # otherwise the change was carried out during this iteration, whose seconds are of neither arrangement
            self._change = None
            self._realised(change, ended, forecast, rows)

    def _realised(
        self, change: RequestedChange, ended: EndedIteration, forecast: StepForecast, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        costs_s = costs_of(change, rows)
        for kind, cost_s in costs_s:
            self.loop.replanner.changed(cost_s, kind)
        before = self.loop.expected(forecast, ended, change.before)
        if before is None:
            return
        gained = 1.0 - ended.step_s / before.step_s
        generation, spent_s = max(change.requested, default=0), sum(cost_s for _, cost_s in costs_s)
        gains = change.predicted_gain_frac, gained
        self._scheduler.tell(
            PlanRealised(change.iteration, generation, *gains, ended.iteration, spent_s if costs_s else None)
        )
        logger.info(
            "changes %s gain %.1f %% of a step, %.1f %% were predicted",
            sorted(change.requested), 100 * gained, 100 * change.predicted_gain_frac,
        )  # fmt: skip


def batch_of(values: Mapping[str, Any]) -> Batch:
    """Tokens that an iteration generated, and tokens of its step."""
    return Batch(float(values["generated_tokens"]), float(values.get("forwarded_tokens", values["generated_tokens"])))


def costs_of(change: RequestedChange, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Kind and seconds of each part of a change; of a role change, until its slowest worker had its new role."""
    rows, found = list(rows), list[tuple[str, float]]()
    for generation, assignments in change.requested.items():
        cost_s = change_cost_s(rows, generation)
        if cost_s is not None:
            joins = any(has["role"] == "lent" for has in assignments.values())
            parts = any(
                len(engine.workers) > 1 and set(engine.workers) & assignments.keys() for engine in change.before.engines
            )
            found.append((REBUCKET if joins or parts else ROLES, cost_s))
    return found if change.limit_s is None else [*found, (SLOTS, change.limit_s)]


def change_cost_s(rows: Iterable[Mapping[str, Any]], generation: int) -> float | None:
    """Seconds of a role change until its slowest worker had its new role; None if it is not the last change of any worker."""
    spent = (row["seconds"] for row in rows if row["generation"] == generation)
    return max((float(seconds) for seconds in spent if seconds is not None), default=None)


def _is(row: Mapping[str, Any], has: Mapping[str, object]) -> bool:
    return bool(row["role"] == has["role"] and row.get("tp", has["tp"]) == has["tp"])


def _near(one: float, other: float) -> bool:
    return max(one, other) <= BOUNDARY_MOVES * min(one, other)
