"""Planning during a run: predicts each iteration, compares worker arrangements, requests changes.

1. An iteration's seconds are predicted before it starts, from this run's measurements, and compared
   when it ends.
2. A change is requested between iterations, and the run does not wait for it. While a change is in
   progress no other is requested. Plans are always considered, but changes are made only with
   ``planner.replan=apply``.
3. The current arrangement is what the scheduler reports (``libra_roles``, ``libra_engines``), never
   what was requested, so a failed or undone change is noticed.
4. Slots are limited before roles change: an engine that will have fewer slots starts with its
   limit.
5. Every considered plan is logged (``plan_considered``). A plan that would pay off but is
   impossible is logged once, with what is missing (``plan_blocked``). A completed change is
   followed by ``plan_realised`` with its gain and cost, after the first iteration that ran entirely
   with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.config import RunConfig
from libra.envs import Environment
from libra.errors import ClusterError, ModelError
from libra.facts import PlanBlocked, PlanRealised
from libra.hardware import ModelShape, load_shape
from libra.observe.metrics import read_metrics
from libra.planner.arrangement_forecast import ArrangementScore, EndedIteration, run_facts
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
from libra.planner.cost import TrajectoryTotals
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.from_config import trainer_layout
from libra.planner.replan import ArrangementLoop, Replanner, SplitDecision
from libra.planner.step_forecast import Batch, ExpectedStep, RealisedStep, StepForecast, Taken
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_numbers import Lengths, question_chars

if TYPE_CHECKING:
    from libra.driver.run_client import RunClient

logger = logging.getLogger(__name__)

BOUNDARY_MOVES = math.sqrt(2.0)
"""New boundaries are set when one would move by more than this factor: a length class, the resolution of forecasts."""


@dataclass(slots=True)
class RequestedChange:
    """A change in progress: role switches by generation; seconds to limit slots, if limited."""

    iteration: int
    predicted_gain_frac: float
    before: Arrangement
    steps: list[list[Assignments]]
    requested: dict[int, Assignments] = field(default_factory=dict)
    limit_s: float | None = None


class Replanning:
    """The arrangement of a run's workers by iteration; ``apply``: carry out accepted plans."""

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
        self._blocked: set[str] = set()  # missing parts already logged

    def begin(self, contexts: Sequence[tuple[int, float]], seats: Collection[Seat]) -> None:
        """Free KV memory for future contexts, extrapolated from (iteration, mean final tokens)."""
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
        """Learn from an iteration, judge the change in progress, and decide on the next change.

        ``values``: the iteration's metrics; ``forecast`` includes them; ``predicted_step_s``: the
        prediction before the iteration, in seconds.
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
    return Batch(float(values["generated_tokens"]), float(values.get("forwarded_tokens", values["generated_tokens"])))


def costs_of(change: RequestedChange, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Kind and seconds of each part of a change: slot limit, role switch or rebucketing."""
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
    """Seconds until a role switch's slowest worker finished; None if all have switched again."""
    spent = (row["seconds"] for row in rows if row["generation"] == generation)
    return max((float(seconds) for seconds in spent if seconds is not None), default=None)


def _is(row: Mapping[str, Any], has: Mapping[str, object]) -> bool:
    return bool(row["role"] == has["role"] and row.get("tp", has["tp"]) == has["tp"])


def _near(one: float, other: float) -> bool:
    return max(one, other) <= BOUNDARY_MOVES * min(one, other)


class UpcomingPrompts:
    """The prompts of upcoming iterations; None once the environment fails to provide one here."""

    def __init__(self, environment: Environment, per_batch: int) -> None:
        self._environment: Environment | None = environment
        self._per_batch = per_batch

    def names(self, iteration: int) -> list[str] | None:
        """Each prompt's ``prompt_id``, "" if it does not recur; None if none of them recurs."""
        names: list[str] | None = self._each(iteration, lambda its, index: its.prompt_id("train", index))
        return names if names is not None and any(names) else None

    def lengths(self, iteration: int) -> list[float] | None:
        return self._each(iteration, lambda its, index: float(question_chars(its.prompt("train", index))))

    def _each(self, iteration: int, read: Callable[[Environment, int], Any]) -> list[Any] | None:
        if self._environment is None:
            return None
        first = iteration * self._per_batch
        try:
            return [read(self._environment, index) for index in range(first, first + self._per_batch)]
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            logger.info("no forecast by prompts, the driver cannot read them: %s: %s", type(error).__name__, error)
            self._environment = None
            return None


class Planning:
    """The planner of one run.

    Parameters
    ----------
    write : callable
        Receives (iteration, metrics).
    workers_gpu : str
        GPU of the run's workers; empty if none or unknown.
    """

    def __init__(
        self,
        spec: RunSpec,
        scheduler: RunClient,
        prompts: UpcomingPrompts,
        write: Callable[[int, Mapping[str, float]], None],
        workers_gpu: str = "",
    ) -> None:
        self._spec, self._scheduler, self._prompts, self._write = spec, scheduler, prompts, write
        self._kinds: dict[str, str] = {}  # kind of each worker's last engine
        self.forecast = StepForecast()
        self.predicted: ExpectedStep | None = None
        self._first: int | None = None
        self._shape: ModelShape | None = None
        try:
            self._shape = load_shape(spec.model_dir)
        except ModelError as error:
            logger.info("no prediction of a step's memory: %s", error)
        planner = spec.config.planner
        self.replanning = Replanning(
            scheduler,
            ArrangementLoop(run_facts(spec.config, workers_gpu), Replanner(first_cost_s=planner.change_cost_s)),
            apply=planner.replan == "apply",
            boundaries={str(tp): tokens for tp, tokens in spec.config.policy.boundaries_tokens.items()},
        )

    def begin(self, first: int) -> None:
        """Before iteration ``first`` of a resumed run, change what would run out of memory.

        Contexts are forecast from mean final contexts of earlier iterations.
        """
        rows = [row for row in read_metrics(self._spec.directory) if row.get("trajectories")] if first else []
        contexts = [(int(row["step"]), row["tokens"] / row["trajectories"]) for row in rows if row["step"] < first]
        if contexts:
            self.replanning.begin(contexts, self._scheduler.seats())

    def after(self, iteration: int, values: Mapping[str, Any], remaining: int) -> None:
        """Compare an iteration with its prediction, predict the next, and weigh arrangements."""
        config = self._spec.config
        self._first = iteration if self._first is None else self._first
        seats = self._scheduler.seats()
        now = arranged(seats)
        self._kinds |= {engine.workers[0]: engine.kind for engine in now.engines}
        alone = iteration == self._first or follows_evaluation(config, iteration)
        realised, predicted = realised_seconds(values, config, alone), self.predicted
        beside = config.run.eta > 0 and config.cluster.train_workers == 1
        self.forecast = self.forecast.after(taken(values, realised, self._kinds, beside=beside), now.by_kind)
        overlap = config.run.eta > 0 and not follows_evaluation(config, iteration + 1)
        self.predicted = self.forecast.expected(now.by_kind, self._prompts.lengths(iteration + 1), overlap)
        lengths = workload_of(values.get("trajectory_lengths", ()))
        ended = EndedIteration(iteration, seats, batch_of(values), lengths, realised.step_s, max(remaining, 0), overlap)
        predicted_s = None if predicted is None else predicted.step_s
        decision = self.replanning.after(ended, values, self.forecast, predicted_s)
        metrics = self._compared(realised, predicted) | decision_metrics(decision)
        measured_bytes = float(values.get("train_peak_bytes", 0))
        if self._shape is not None and lengths is not None and measured_bytes:
            on_cpu = not values.get("train_on_gpu")
            metrics |= compared_memory(config, self._shape, lengths, measured_bytes, on_cpu=on_cpu)
        self._write(iteration, metrics)

    def _compared(self, realised: RealisedStep, predicted: ExpectedStep | None) -> dict[str, float]:
        values = {"plan/realised_s": realised.step_s, "plan/realised_rollout_s": realised.rollout_s}
        if predicted is not None:
            values |= {
                "plan/predicted_s": predicted.step_s,
                "plan/error_frac": predicted.step_s / realised.step_s - 1.0,
                "plan/predicted_rollout_s": predicted.rollout_s,
                "plan/predicted_train_s": predicted.train_s,
                "plan/predicted_tokens": predicted.tokens,
            }
        speeds = self.forecast.tokens_per_s()
        return values | {f"plan/tokens_per_s/{kind}": speed for kind, speed in speeds.items()}


def decision_metrics(decision: SplitDecision | None) -> dict[str, float]:
    if decision is None:
        return {}
    found = {
        "plan/accepted": float(decision.considered.accepted),
        "plan/kv_demand": decision.now.kv_demand,
        "plan/context_tokens": decision.context_tokens,
    }
    return found | {"plan/proposed_step_s": decision.considered.proposed_step_s}


def workload_of(rows: Sequence[Lengths]) -> TrajectoryTotals | None:
    """A batch's trajectory lengths, for the planner; None without trajectories."""
    if not rows:
        return None
    prompt, generated, observed, turns, tool_s = np.array(rows, float).T
    return TrajectoryTotals(prompt, np.maximum(generated, 1.0), observed, np.maximum(turns, 1.0), tool_s)


def follows_evaluation(config: RunConfig, iteration: int) -> bool:
    """Whether an evaluation precedes ``iteration``, so that no part of it started earlier."""
    every = config.evaluation.every
    return every > 0 and iteration > 0 and iteration % every == 0


def realised_seconds(values: Mapping[str, Any], config: RunConfig, alone: bool = False) -> RealisedStep:
    """Seconds of rollout, training and step from an iteration's metrics, without evaluations.

    Rollout is the time outside training and publication, for which engines wait. If steps overlap
    (eta >= 1), rollout counts as the whole step, except in an iteration with no predecessor
    (``alone``).
    """
    step_s = float(values["iteration_s"]) - float(values.get("evaluation_s", 0.0))
    train_s = max(float(values.get("train_s", 0.0)), 1e-6)
    waits_s = train_s + float(values.get("publish_s", 0.0))
    rollout_s = step_s - waits_s if config.run.eta == 0 or alone else step_s
    return RealisedStep(max(rollout_s, 1e-6), train_s, step_s)


def taken(
    values: Mapping[str, Any], realised: RealisedStep, kinds: Mapping[str, str], *, beside: bool = False
) -> Taken:
    """An iteration as input of `libra.planner.step_forecast`; departed workers count as "gone".

    ``beside``: publication overlapped the next step; only the excess over its training counts.
    """
    publish_s = float(values.get("publish_s", 0.0))
    tokens: Counter[str] = Counter()
    for worker, number in values["worker_tokens"].items():
        tokens[kinds.get(worker, "gone")] += number
    return Taken(
        realised.rollout_s,
        realised.training_s,
        max(0.0, publish_s - realised.training_s) if beside else publish_s,
        realised.step_s,
        tokens,
        [(float(chars), float(number)) for chars, number in values["question_tokens"]],
        [(float(chars), float(number)) for chars, number in values.get("trained_tokens", ())],
    )


def compared_memory(
    config: RunConfig, shape: ModelShape, workload: TrajectoryTotals, measured_bytes: float, *, on_cpu: bool
) -> dict[str, float]:
    layout = replace(trainer_layout(config, workload), on_cpu=on_cpu, runtime_bytes=0.0)
    workers = config.cluster.train_workers
    predicted = sum(memory_parts_bytes(shape, workload.final_context_tokens, workers, layout).values())
    return {
        "plan/train_peak_bytes": measured_bytes,
        "plan/predicted_train_peak_bytes": predicted,
        "plan/train_peak_error_frac": predicted / measured_bytes - 1.0,
    }
