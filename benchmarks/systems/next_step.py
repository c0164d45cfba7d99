"""The next steps of a plan in virtual time, in each of some ways: the simulator of `benchmarks.systems`, with the plan's own
engines, trainers, lengths and seconds of an update; first come, first served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.systems.disciplines import Discipline, Roles
from benchmarks.systems.pipeline import Pipeline
from benchmarks.systems.pipeline_options import PipelineOptions
from benchmarks.systems.training_gpus import GroupWork, group_work, sample_seconds
from libra.config import RunConfig
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.planner.cost import TrajectoryTotals
from libra.planner.plan import Plan
from libra.planner.snapshot import PlanningSnapshot
from libra.policy import Fifo
from libra.policy.step_ways import SPLIT, STREAMING, TURNING
from libra.policy.turning import TurningRule
from libra.policy.waves import GroupId
from libra.sim.simulation_options import fleet
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import NO_TOOL, ToolStatus

ASSUMED = TurningRule()


def simulated_ways(config: RunConfig, plan: Plan, snapshot: PlanningSnapshot, ways: Sequence[str]) -> dict[str, float]:
    """Seconds of a step of ``plan`` by way, without the first steps where steps overlap."""
    left_out = plan.eta + 1 if plan.eta else 0
    steps = left_out + 2 if plan.eta else 1
    workload = planned_workload(snapshot.workload, steps + plan.eta, config.trainer.group_size, config.run.seed)
    work = trained_work(workload, snapshot, plan.train_s * plan.training.gpus, config.run.seed)
    seconds = {
        tp: (snapshot.engines or {}).get(tp) or engine_seconds(snapshot.gpu, snapshot.shape, tp) for tp in plan.engines
    }
    engines = fleet(
        plan.engines, {tp: EngineTables(each) for tp, each in seconds.items()},
        {bucket.tp: bucket.concurrency for bucket in plan.buckets},
    )  # fmt: skip
    share = config.planner.change_cost_s / (ASSUMED.to_training_s + ASSUMED.to_rollout_s)
    options = PipelineOptions(
        eta=plan.eta, core_gpus=plan.training.gpus, update_s=plan.update_s, beside_s=plan.beside_s, close_s=0.0, load_s=0.0,
        teacher_token_s=planned_teacher_token_s(plan, snapshot, workload),
        rule=TurningRule(to_training_s=share * ASSUMED.to_training_s, to_rollout_s=share * ASSUMED.to_rollout_s),
        num_steps=steps, causes=False,
    )  # fmt: skip
    found = dict[str, float]()
    for way in ways:
        pipeline = Pipeline(
            workload, engines, Fifo(), discipline_of(way, plan.eta), work, options, seed=config.run.seed
        )
        found[way] = pipeline.train().step_s(left_out)
    return found


def planned_teacher_token_s(plan: Plan, snapshot: PlanningSnapshot, workload: Workload) -> float:
    """Seconds of the plan's teacher and services per token of ``workload``, so that they take as long for an iteration as for the
    plan's batch, one after the other; 0 without any that batches wait for."""
    seconds = plan.teacher_s if snapshot.services.teacher is not None and snapshot.services.teacher.waits else 0.0
    seconds += plan.services_s if any(model.waits for model in snapshot.services.models) else 0.0
    return seconds / sum(each.final_tokens for each in workload.trajectories if each.iteration == 0)


def discipline_of(way: str, eta: int) -> Discipline:
    """A way as the run of a configuration takes it; ValueError for one that no run takes."""
    if way == SPLIT:
        return Discipline("a step that is not streamed", (eta,), own_batches=not eta)
    if way not in (STREAMING, TURNING):
        raise ValueError(f"way: got {way!r}; allowed are {SPLIT}, {STREAMING}, {TURNING}")
    roles = Roles.TURNING if way == TURNING else Roles.SPLIT
    return Discipline("a streamed step", (eta,), streaming=True, roles=roles)


def planned_workload(totals: TrajectoryTotals, iterations: int, group_size: int, seed: int) -> Workload:
    """Iterations whose trajectories have these totals, in another order in each; turns of equal length."""
    rng, plans = np.random.default_rng(seed), []
    columns = (
        totals.prompt_tokens, totals.generated_tokens, totals.observation_tokens, totals.num_turns, totals.tool_wait_s
    )  # fmt: skip
    each = [(max(1, int(prompt)), _turns(*rest)) for prompt, *rest in zip(*(c.tolist() for c in columns), strict=True)]
    for iteration in range(iterations):
        for place, row in enumerate(rng.permutation(len(each)).tolist()):
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
