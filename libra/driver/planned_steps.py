"""How the steps of a plan should be taken (`libra.policy.step_ways`), and the settings for it.

1. Only ways that the configuration can take are chosen; of the others it is said what stands against them.
2. The settings of a choice pass validation: `with_way` either returns a configuration or raises ConfigError.
"""

from __future__ import annotations

from libra.config import RunConfig, config_from_dict
from libra.config.streaming import streaming_obstacle, turning_obstacle
from libra.errors import ConfigError
from libra.hardware import engine_seconds
from libra.planner.cost import rollout_cost
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.plan import Plan
from libra.planner.snapshot import PlanningSnapshot
from libra.policy.step_ways import SPLIT, STREAMING, TURNING, Regime, StepParts, regime


def planned_regime(config: RunConfig, plan: Plan, snapshot: PlanningSnapshot) -> Regime:
    """What bounds a step of ``plan``, and how a run of ``config`` with its layout should take it."""
    return regime(
        step_parts(plan, snapshot),
        changes_s=config.planner.change_cost_s,
        obstacles=obstacles(config, plan, snapshot),
    )


def settings(config: RunConfig, plan: Plan, way: str) -> dict[str, str]:
    """What to type for a way, beside the layout of ``plan``; empty: nothing."""
    if way == SPLIT:
        return {}
    try:
        laid = _laid_out(config, plan)
    except ConfigError:  # a plan of more than can be run (--what-if): then no engine turns
        laid = config
    made = with_way(laid, way)
    found = {
        "trainer.streaming": (laid.trainer.streaming, made.trainer.streaming),
        "trainer.turning": (laid.trainer.turning, made.trainer.turning),
        "cluster.hybrid_workers": (laid.cluster.hybrid_workers, made.cluster.hybrid_workers),
    }
    return {name: str(value) for name, (before, value) in found.items() if value != before}


def step_parts(plan: Plan, snapshot: PlanningSnapshot) -> StepParts:
    """The parts of a planned step."""
    tp = max(bucket.tp for bucket in plan.buckets)
    engine = (snapshot.engines or {}).get(tp) or engine_seconds(snapshot.gpu, snapshot.shape, tp)
    longest = int(rollout_cost(snapshot.workload, engine).alone_s.argmax())
    return StepParts(
        gpus=plan.num_gpus, train_gpus=plan.training.gpus, eta=plan.eta, rollout_s=plan.rollout_s, train_s=plan.train_s,
        update_s=plan.update_s, beside_s=plan.beside_s, throughput_s=plan.bounds.throughput_s, longest_s=plan.bounds.longest_s,
        tool_s=float(snapshot.workload.tool_wait_s[longest]), needed_gpus=plan.needed_gpus,
    )  # fmt: skip


def obstacles(config: RunConfig, plan: Plan, snapshot: PlanningSnapshot) -> dict[str, str]:
    """Ways that a run of ``config`` with the layout of ``plan`` cannot take, and why."""
    if (streams := streaming_obstacle(config)) is not None:
        return {STREAMING: streams, TURNING: streams}
    try:
        laid = _laid_out(config, plan)
    except ConfigError as error:  # a plan of more than can be run (--what-if)
        return {TURNING: str(error)}
    try:
        with_way(laid, TURNING)
    except ConfigError as error:
        found = turning_obstacle(_turning(laid)) or str(error)
    else:
        alone = memory_parts_bytes(snapshot.shape, snapshot.workload.final_context_tokens, 1, snapshot.training)
        needs = sum(alone.values()) - alone["optimizer"]  # the core takes the optimizer's step
        if needs <= snapshot.gpu.memory_bytes or snapshot.training.on_cpu:
            return {}
        found = (
            f"the gradients of an engine's GPU would take {needs / 1e9:.0f} GB, and a {snapshot.gpu.name} has "
            f"{snapshot.gpu.memory_bytes / 1e9:.0f} GB"
        )
    return {TURNING: found}


def with_way(config: RunConfig, way: str) -> RunConfig:
    """``config`` with the settings of a way; ``split``: nothing is changed. ConfigError if they contradict others."""
    if way == SPLIT:
        return config
    values = config.model_dump()
    keeps = config.trainer.streaming == "auto"  # the run begins with the planned way, and measures
    values["trainer"] |= {"streaming": "auto" if keeps else "on"}
    if way == TURNING:
        values["trainer"] |= {"turning": "auto" if config.trainer.turning == "auto" else "on"}
        values["cluster"] |= {"hybrid_workers": config.cluster.hybrid_workers or _engines(config)}
    return config_from_dict(values)


def _laid_out(config: RunConfig, plan: Plan) -> RunConfig:
    """``config`` with the workers of a plan; ConfigError if they contradict its other settings."""
    values = config.model_dump()
    engines = [{"tp": bucket.tp, "count": bucket.engines, "slots": bucket.concurrency} for bucket in plan.buckets]
    values["cluster"] |= {"train_workers": plan.training.gpus, "engines": engines, "rollout_workers": 1}
    values["planner"] |= {"layout": "configured", "planned": None}
    return config_from_dict(values)


def _engines(config: RunConfig) -> int:
    return sum(group.count for group in config.cluster.engines) or config.cluster.rollout_workers


def _turning(config: RunConfig) -> RunConfig:
    """``config`` with engines that turn, not validated."""
    trainer = config.trainer.model_copy(update={"streaming": "on", "turning": "on"})
    cluster = config.cluster.model_copy(update={"hybrid_workers": config.cluster.hybrid_workers or _engines(config)})
    return config.model_copy(update={"trainer": trainer, "cluster": cluster})
