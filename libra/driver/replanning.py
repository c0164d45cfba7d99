"""Plans that are carried out: after each iteration, what the run's workers should do, and the changes that lead there.

1. A change is asked for once, between iterations; nobody waits for it. While one goes on, nothing else is asked for.
2. What runs is what the scheduler says (``libra_roles``, ``libra_engines``), never what was asked for: there a change is seen
   that failed or was undone.
3. Slots are limited before roles change: an engine that is to come up with fewer has its limit before it is there.
4. Every consideration is in the event log, accepted or not (``plan_considered``), and what would pay and cannot be had too, with
   what is missing (``plan_blocked``), once. A change that was carried out is followed by ``plan_realised`` after the first
   iteration that began and ended with it, with what it gained and cost.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from libra.errors import ClusterError
from libra.events import to_dict
from libra.planner.arrangement_loop import ArrangementLoop, ArrangementScore, SplitDecision
from libra.planner.arrangements import Arrangement, Assignments, Seat, arranged, limits_for, steps_to
from libra.planner.cost import Workload
from libra.planner.hybrid_splits import Batch
from libra.planner.measured_step import StepForecast
from libra.planner.plan_log_events import plan_log_events
from libra.planner.replan import REBUCKET, ROLES, SLOTS

logger = logging.getLogger(__name__)

BOUNDARY_MOVES = math.sqrt(2.0)
"""Boundaries are set anew when one is to be further off than this factor: a length class, as finely as lengths are told."""


class RunCalls(Protocol):
    """What is asked of the scheduler; `libra.driver.run_client.AskingRun` in a run."""

    def role_rows(self) -> Sequence[Mapping[str, Any]]:
        """Of each worker that can change: worker, role, tp, stage, generation, and seconds of its last change (None: none yet)."""

    def change(self, assignments: Assignments) -> int:
        """Begin a change to these roles; its generation, or ClusterError."""

    def limit_slots(self, slots: Mapping[str, Mapping[str, int]], reason: str) -> None:
        """Limit slots of engines, or ClusterError."""

    def set_boundaries(self, tokens: Mapping[str, float], reason: str) -> None:
        """Mean trajectories for engines by their length."""


@dataclass(slots=True)
class RoleRequest:
    """One that was asked for: after which iteration, what it should gain, what ran before, and what is still to be asked.

    ``asked`` are its changes of roles by generation, ``limit_s`` the seconds in which slots were limited; None: they stayed.
    """

    iteration: int
    predicted_gain_frac: float
    before: Arrangement
    steps: list[list[Assignments]]
    asked: dict[int, Assignments] = field(default_factory=dict)
    limit_s: float | None = None


class Replanning:
    """What one run's workers do, followed iteration by iteration.

    Parameters
    ----------
    calls : RunCalls
    loop : ArrangementLoop
    tell : callable
        Takes (name, fields) of an event for the run's log.
    apply : bool
        Whether accepted plans are carried out.
    boundaries : mapping
        Those that the run began with.
    """

    def __init__(
        self,
        calls: RunCalls,
        loop: ArrangementLoop,
        tell: Callable[[str, Mapping[str, Any]], None],
        *,
        apply: bool = True,
        boundaries: Mapping[str, float] | None = None,
    ) -> None:
        self._calls, self.loop, self._tell, self._apply = calls, loop, tell, apply
        self._boundaries = dict(boundaries or {})
        self._change: RoleRequest | None = None
        self._began_with: Arrangement | None = None  # what the iteration that is under way began with
        self._known = StepForecast()  # before the iteration that is under way
        self._blocked: set[str] = set()  # what was said to be missing

    def begin(self, contexts: Sequence[tuple[int, float]], seats: Collection[Seat]) -> None:
        """Hear of contexts of earlier starts, as (iteration, mean at the end), and make room for those to come."""
        for iteration, mean_tokens in contexts:
            self.loop.trend = self.loop.trend.after(iteration, mean_tokens)
        last = contexts[-1][0]
        weighed = self.loop.weigh(last, StepForecast(), seats, Batch(0.0, 0.0), None, 1, False, 0.0)
        if weighed is not None:
            self._say(last, weighed, 0.0, None)
            if weighed.kinds and self._apply:
                self._ask(last, weighed, seats)

    def after(
        self,
        iteration: int,
        values: Mapping[str, Any],
        realised_step_s: float,
        seats: Collection[Seat],
        forecast: StepForecast,
        lengths: Workload | None,
        remaining: int,
        overlap: bool,
        predicted_step_s: float | None = None,
    ) -> SplitDecision | None:
        """Hear an iteration: learn from it, compare a change with what it was to gain, weigh the options, ask for a change.

        Parameters
        ----------
        values : mapping
            Numbers of the iteration.
        realised_step_s : float
            Evaluations left out.
        seats : collection of Seat
            The rollout workers as they are.
        forecast : StepForecast
            With this iteration in it.
        lengths : Workload or None
            Its trajectories.
        remaining : int
            Iterations to come.
        overlap : bool
            Whether batches are generated while steps are taken.
        predicted_step_s : float or None
            What this iteration was to take, as it was predicted before it began; None: nobody did.
        """
        now, batch = arranged(seats), batch_of(values)
        whole = self._began_with == now
        if whole:
            replicas = self.loop.run.core_trainers + int(values.get("hybrids", 0))
            train_s = float(values.get("train_s", 0.0))
            self.loop.learn(self._known, seats, batch, replicas, train_s, realised_step_s, overlap)
        self.loop.saw(iteration, lengths)
        self._began_with, self._known = now, forecast
        if self._change is not None:
            rows = list(self._calls.role_rows())
            self._follow(
                self._change, iteration, rows, seats, whole, batch, lengths, realised_step_s, forecast, overlap
            )
        if self._change is not None:
            return None
        weighed = self.loop.weigh(iteration, forecast, seats, batch, lengths, remaining, overlap, realised_step_s)
        if weighed is not None:
            self._say(iteration, weighed, realised_step_s, predicted_step_s)
            if weighed.kinds and self._apply:
                self._ask(iteration, weighed, seats)
            if self._apply:
                self._bound(weighed)
        return weighed

    # ---------------------------------------------------------------- what is said

    def _say(
        self, iteration: int, weighed: SplitDecision, realised_step_s: float, predicted_step_s: float | None
    ) -> None:
        now, boundaries = weighed.now, tuple(weighed.boundaries_tokens.values())
        memory = (weighed.context_tokens, now.kv_demand)
        for event in plan_log_events(
            weighed.considered,
            predicted_step_s,
            realised_step_s,
            None,
            boundaries,
            weighed.considered.concurrency,
            memory=memory,
        ):
            self._tell(event.name, fields_of(event))
        for option, gain_frac in weighed.blocked:
            self._say_blocked(iteration, option, gain_frac)

    def _say_blocked(self, iteration: int, option: ArrangementScore, gain_frac: float) -> None:
        missing = option.arrangement.missing
        if missing in self._blocked:
            return
        self._blocked.add(missing)
        wanted = option.arrangement.deployed(self.loop.run.core_trainers)
        fields = {
            "iteration": iteration, "missing": missing, "gain_frac": gain_frac, "kv_demand": option.kv_demand,
            "train_gpus": wanted.train_gpus, "engines": tuple(sorted(wanted.engines.items())),
            "concurrency": tuple(sorted(wanted.concurrency.items())),
        }  # fmt: skip
        self._tell("plan_blocked", fields)
        logger.warning("a plan that gains %.1f %% of a step cannot be carried out: %s", 100 * gain_frac, missing)

    # ---------------------------------------------------------------- what is asked for

    def _ask(self, iteration: int, weighed: SplitDecision, seats: Collection[Seat]) -> None:
        now, wanted = weighed.now.arrangement, weighed.chosen.arrangement
        steps = steps_to(now, wanted, {seat.name: seat.tp for seat in seats})
        change = RoleRequest(iteration, weighed.considered.gain_frac, now, steps)
        try:
            if limits := limits_for(now, wanted):
                began_s = time.perf_counter()
                self._calls.limit_slots(limits, weighed.considered.reason)
                change.limit_s = time.perf_counter() - began_s if SLOTS in weighed.kinds else None
            self._next_step(change)
        except ClusterError as error:  # somebody else changes roles, or a worker has just left: the next plan sees it
            self._refused(iteration, weighed.chosen, weighed.considered.gain_frac, str(error))
            return
        self._change = change
        logger.info(
            "%s: %s, instead of %s (changes %s)", weighed.considered.reason, wanted.shown, now.shown,
            sorted(change.asked) or "of slots only",
        )  # fmt: skip

    def _next_step(self, change: RoleRequest) -> None:
        for assignments in change.steps.pop(0) if change.steps else []:
            change.asked[self._calls.change(assignments)] = assignments

    def _refused(self, iteration: int, wanted: ArrangementScore, gain_frac: float, error: str) -> None:
        logger.warning("the plan of iteration %d is not carried out: %s", iteration, error)
        deployed = wanted.arrangement.deployed(self.loop.run.core_trainers)
        fields = {
            "iteration": iteration, "missing": error, "gain_frac": gain_frac, "kv_demand": wanted.kv_demand,
            "train_gpus": deployed.train_gpus, "engines": tuple(sorted(deployed.engines.items())),
            "concurrency": tuple(sorted(deployed.concurrency.items())),
        }  # fmt: skip
        self._tell("plan_blocked", fields)

    def _bound(self, weighed: SplitDecision) -> None:
        """Set boundaries anew where what should run has others than those that hold."""
        wanted, has = dict(weighed.boundaries_tokens), self._boundaries
        if not wanted or (wanted.keys() == has.keys() and all(_near(wanted[tp], has[tp]) for tp in wanted)):
            return
        self._calls.set_boundaries(wanted, "a plan: lengths by what engines of each degree generate")
        self._boundaries = wanted

    # ---------------------------------------------------------------- what became of it

    def _follow(
        self,
        change: RoleRequest,
        iteration: int,
        rows: Sequence[Mapping[str, Any]],
        seats: Collection[Seat],
        whole: bool,
        batch: Batch,
        lengths: Workload | None,
        step_s: float,
        forecast: StepForecast,
        overlap: bool,
    ) -> None:
        now = {str(row["worker"]): row for row in rows}
        targets = {name: has for assignments in change.asked.values() for name, has in assignments.items()}
        stages = {now[name]["stage"] for name in targets if name in now}
        if not stages <= {"resupplied", "failed"}:
            return
        if "failed" in stages or any(name not in now or not _is(now[name], has) for name, has in targets.items()):
            logger.warning("changes %s were not carried out, or undone; see role_change_failed", sorted(change.asked))
            self._change = None
            return
        if change.steps:
            self._go_on(change)
            return
        if not whole:
            return  # it was carried out in the middle of this iteration
        self._change = None
        costs_s = costs_of(change, rows)
        if self.loop.replanner is not None:
            for kind, cost_s in costs_s:
                self.loop.replanner.changed(cost_s, kind)
        before = self.loop.expected(forecast, seats, change.before, batch, lengths, overlap)
        if before is None:
            return
        gained = 1.0 - step_s / before.step_s
        fields = {
            "iteration": change.iteration, "generation": max(change.asked, default=0),
            "predicted_gain_frac": change.predicted_gain_frac, "realised_gain_frac": gained,
            "realised_iteration": iteration, "cost_s": sum(cost_s for _, cost_s in costs_s) if costs_s else None,
        }  # fmt: skip
        self._tell("plan_realised", fields)
        logger.info(
            "changes %s gain %.1f %% of a step, %.1f %% were predicted", sorted(change.asked), 100 * gained,
            100 * change.predicted_gain_frac,
        )  # fmt: skip

    def _go_on(self, change: RoleRequest) -> None:
        try:
            self._next_step(change)
        except ClusterError as error:
            logger.warning("a plan is carried out in part: %s", error)
            self._change = None


def batch_of(values: Mapping[str, Any]) -> Batch:
    """What an iteration generated, and what its step was taken on."""
    return Batch(float(values["generated_tokens"]), float(values.get("forwarded_tokens", values["generated_tokens"])))


def costs_of(change: RoleRequest, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Kind and seconds of each part of a change; those of roles until the slowest worker was in its new one."""
    rows, found = list(rows), list[tuple[str, float]]()
    for generation, assignments in change.asked.items():
        cost_s = change_cost_s(rows, generation)
        if cost_s is not None:
            joins = any(has["role"] == "lent" for has in assignments.values())
            parts = any(
                len(engine.workers) > 1 and set(engine.workers) & assignments.keys() for engine in change.before.engines
            )
            found.append((REBUCKET if joins or parts else ROLES, cost_s))
    return found if change.limit_s is None else [*found, (SLOTS, change.limit_s)]


def change_cost_s(rows: Iterable[Mapping[str, Any]], generation: int) -> float | None:
    """Seconds of a change until its slowest worker was in its new role; None where no worker's last change was this one."""
    spent = (row["seconds"] for row in rows if row["generation"] == generation)
    return max((float(seconds) for seconds in spent if seconds is not None), default=None)


def fields_of(event: Any) -> dict[str, Any]:
    """Fields of an event beside those that the log adds."""
    return {name: value for name, value in to_dict(event).items() if name not in ("schema", "name", "run", "t_s")}


def _is(row: Mapping[str, Any], has: Mapping[str, object]) -> bool:
    return row["role"] == has["role"] and row.get("tp", has["tp"]) == has["tp"]


def _near(one: float, other: float) -> bool:
    return max(one, other) <= BOUNDARY_MOVES * min(one, other)
