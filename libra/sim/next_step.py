"""The next steps of a plan in virtual time, in each of some ways: the simulator of `libra simulate --against`, with the plan's own
engines, trainers, lengths and seconds of an update; first come, first served.

1. The same plan and seed give the same seconds, unless time runs out.
2. It takes `LIMIT_S` seconds of CPU time at most, and a moment: a way that is not finished by then has no seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from libra.config import RunConfig
from libra.hardware import engine_seconds
from libra.hardware.virtual_engine import EngineTables
from libra.planner.cost import TrajectoryTotals
from libra.planner.plan import Plan
from libra.planner.snapshot import PlanningSnapshot
from libra.policy import Fifo
from libra.policy.step_ways import SPLIT, STREAMING, TURNING
from libra.policy.turning import TurningRule
from libra.policy.waves import GroupId
from libra.sim.disciplines import Discipline, Roles
from libra.sim.engines import fleet
from libra.sim.pipeline import Pipeline
from libra.sim.pipeline_options import PipelineOptions
from libra.sim.pipeline_result import PipelineResult
from libra.sim.training_gpus import GroupWork, group_work, sample_seconds
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import NO_TOOL, ToolStatus

LIMIT_S = 5.0
"""Seconds of CPU time for all ways together."""
MAX_TURNS = 2500
"""Turns that are simulated of each way; of a larger plan, a part with the same load is."""
ASSUMED = TurningRule()


def simulated_ways(
    config: RunConfig,
    plan: Plan,
    snapshot: PlanningSnapshot,
    ways: Sequence[str],
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Seconds of a step of ``plan`` by way, without the first steps where steps overlap; ``clock`` measures `LIMIT_S`."""
    until_s, found = clock() + LIMIT_S, dict[str, float]()
    left_out = plan.eta + 1 if plan.eta else 0
    steps = left_out + 2 if plan.eta else 1
    part = part_of(plan, snapshot.workload, steps, config.trainer.group_size)
    workload = planned_workload(snapshot.workload, steps + plan.eta, part, config.trainer.group_size, config.run.seed)
    work = trained_work(workload, snapshot, plan.train_s * part.core_gpus, config.run.seed)
    seconds = {
        tp: (snapshot.engines or {}).get(tp) or engine_seconds(snapshot.gpu, snapshot.shape, tp) for tp in part.engines
    }
    engines = fleet(
        part.engines, {tp: EngineTables(each) for tp, each in seconds.items()},
        {bucket.tp: bucket.concurrency for bucket in plan.buckets},
    )  # fmt: skip
    share = config.planner.change_cost_s / (ASSUMED.to_training_s + ASSUMED.to_rollout_s)
    rule = TurningRule(to_training_s=share * ASSUMED.to_training_s, to_rollout_s=share * ASSUMED.to_rollout_s)
    options = PipelineOptions(
        eta=plan.eta,
        core_gpus=part.core_gpus,
        update_s=plan.update_s,
        beside_s=plan.beside_s,
        close_s=0.0,
        load_s=0.0,
        teacher_token_s=planned_teacher_token_s(plan, snapshot, workload),
        rule=rule,
        num_steps=steps,
        causes=False,
    )
    for way in ways:
        discipline = discipline_of(way, plan.eta)
        pipeline = _Bounded(workload, engines, Fifo(), discipline, work, options, seed=config.run.seed)
        result = pipeline.bounded(until_s, clock)
        if result is None:
            break
        found[way] = result.step_s(left_out)
    return found


def planned_teacher_token_s(plan: Plan, snapshot: PlanningSnapshot, workload: Workload) -> float:
    """Seconds of the plan's teacher and services per token of ``workload``, so that they take as long for an iteration as for the
    plan's batch, one after the other; 0 without any that batches wait for."""
    seconds = plan.teacher_s if snapshot.teacher is not None and snapshot.teacher.waits else 0.0
    seconds += plan.services_s if snapshot.services is not None and snapshot.services.waits else 0.0
    return seconds / sum(each.final_tokens for each in workload.trajectories if each.iteration == 0)


class Part(NamedTuple):
    """The part of a plan that is simulated: engines by degree, core trainers, and groups of a batch."""

    engines: Mapping[int, int]
    core_gpus: int
    groups: int


def part_of(plan: Plan, totals: TrajectoryTotals, steps: int, group_size: int) -> Part:
    """As much of a plan as `MAX_TURNS` allow, with as many trajectories for each GPU of an engine."""
    share = min(1.0, MAX_TURNS / (steps * float(totals.num_turns.sum())))
    engines = {tp: max(1, round(share * count)) for tp, count in sorted(plan.engines.items())}
    loaded = sum(tp * count for tp, count in engines.items()) / plan.rollout_gpus
    groups = max(2, round(loaded * len(totals) / group_size)) if share < 1.0 else max(1, len(totals) // group_size)
    return Part(engines, max(1, round(share * plan.training.gpus)), groups)


def discipline_of(way: str, eta: int) -> Discipline:
    """A way as the run of a configuration takes it; ValueError for one that no run takes."""
    if way == SPLIT:
        return Discipline("a step that is not streamed", (eta,), own_batches=not eta)
    if way not in (STREAMING, TURNING):
        raise ValueError(f"way: got {way!r}; allowed are {SPLIT}, {STREAMING}, {TURNING}")
    roles = Roles.TURNING if way == TURNING else Roles.SPLIT
    return Discipline("a streamed step", (eta,), streaming=True, roles=roles)


def planned_workload(totals: TrajectoryTotals, iterations: int, part: Part, group_size: int, seed: int) -> Workload:
    """Iterations whose trajectories have these totals, in another order in each; turns of equal length.

    Where a batch has fewer, they are from the shortest to the longest alike.
    """
    rng, plans = np.random.default_rng(seed), []
    columns = (
        totals.prompt_tokens, totals.generated_tokens, totals.observation_tokens, totals.num_turns, totals.tool_wait_s
    )  # fmt: skip
    each = [(max(1, int(prompt)), _turns(*rest)) for prompt, *rest in zip(*(c.tolist() for c in columns), strict=True)]
    number = part.groups * group_size
    by_length = np.argsort(totals.generated_tokens, kind="stable")
    taken = by_length[np.linspace(0, len(totals) - 1, number).round().astype(int)]
    for iteration in range(iterations):
        for place, row in enumerate(rng.permutation(taken).tolist()):
            plans.append(TrajectoryPlan(iteration, *divmod(place, group_size), *each[row]))
    return Workload("plan", tuple(plans))


def _turns(generated: float, observed: float, num_turns: float, tool_s: float) -> tuple[TurnPlan, ...]:
    turns = max(1, min(round(num_turns), int(generated)))
    new = np.diff(np.linspace(0, max(1, int(generated)), turns + 1).round()).astype(int).tolist()
    calls = turns - 1
    if not calls:
        return (TurnPlan(new[0], "", NO_TOOL, 0, 0.0),)
    called = [TurnPlan(tokens, "tool", ToolStatus.OK, int(observed / calls), tool_s / calls) for tokens in new[:-1]]
    return (*called, TurnPlan(new[-1], "", NO_TOOL, 0, 0.0))


def trained_work(
    workload: Workload, snapshot: PlanningSnapshot, step_gpu_s: float, seed: int
) -> Mapping[GroupId, GroupWork]:
    """GPU-seconds of each group's gradients: together ``step_gpu_s`` a step, and none of groups that have no gradient."""
    modelled = group_work(sample_seconds(workload, snapshot.gpu, snapshot.shape))
    iterations = 1 + max(iteration for iteration, _ in modelled)
    rng = np.random.default_rng([seed, 1])
    kept = {place: bool(rng.random() < snapshot.trained_frac) for place in sorted(modelled)}
    kept |= {} if any(kept.values()) else {min(kept): True}
    total = sum(work.gpu_s for place, work in modelled.items() if kept[place])
    factor = step_gpu_s * iterations / total
    return {
        place: GroupWork(work.gpu_s * factor, work.longest_s * factor) if kept[place] else GroupWork(0.0, 0.0)
        for place, work in modelled.items()
    }


class _Bounded(Pipeline):
    """A pipeline that gives up when time runs out."""

    def bounded(self, until_s: float, clock: Callable[[], float]) -> PipelineResult | None:
        """Its result; None if it was given up."""
        self._until_s, self._clock = until_s, clock
        try:
            return self.train()
        except TimeoutError:
            return None

    def _is_over(self, iterations: int) -> bool:
        if self._clock() > self._until_s:
            raise TimeoutError
        return super()._is_over(iterations)
