"""The layout that a run starts with: configured, or planned before any worker starts.

1. A plan uses seconds measured on this machine, or the datasheet of a GPU that the configuration
   names or the machine has. It never silently uses another machine's numbers, and names its source.
2. A layout that cannot start here is refused before any worker starts, with what is missing and
   what to type.
3. Only step modes that the configuration permits are chosen; the others are listed with obstacles.
4. The settings of a choice are validated: `with_way` returns a valid configuration or raises
   ConfigError.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from libra.cluster.hardware_inventory import CPU, Machine, cluster_gpu, this_machine
from libra.config import RunConfig, config_from_dict
from libra.config.planner import PlannedLayout
from libra.config.streaming import streaming_obstacle, turning_obstacle
from libra.errors import ConfigError, ModelError, PlanError
from libra.facts import LayoutPlanned
from libra.hardware import engine_seconds, load_gpu
from libra.planner.agent_turns import read_agent_turns
from libra.planner.cost import TrajectoryTotals, rollout_cost
from libra.planner.cost.rollout_cost import TRACE_COLUMNS, totals_of_trace
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.from_config import planned_gpu, shape_of, snapshot_of
from libra.planner.from_config import rests_on as calibrated_rests_on
from libra.planner.plan import Plan
from libra.planner.plan_settings import check_planned, layout_of, planned, with_plan
from libra.planner.snapshot import PlanningSnapshot
from libra.policy.step_ways import SPLIT, STREAMING, TURNING, Regime, StepParts, regime

if TYPE_CHECKING:
    from distributed import Client


def planned_regime(config: RunConfig, plan: Plan, snapshot: PlanningSnapshot) -> Regime:
    """The bottleneck of a step of ``plan``, and the step mode that suits ``config``."""
    return regime(
        step_parts(plan, snapshot),
        changes_s=config.planner.change_cost_s,
        obstacles=obstacles(config, plan, snapshot),
    )


def settings(config: RunConfig, plan: Plan, way: str) -> dict[str, str]:
    """Settings to type for step mode ``way`` besides the layout of ``plan``; empty if none."""
    if way == SPLIT:
        return {}
    try:
        laid = _laid_out(config, plan)
    except ConfigError:  # a plan too large to run (--what-if): no engine switches roles
        laid = config
    made = with_way(laid, way)
    found = {
        "trainer.streaming": (laid.trainer.streaming, made.trainer.streaming),
        "trainer.turning": (laid.trainer.turning, made.trainer.turning),
        "cluster.hybrid_workers": (laid.cluster.hybrid_workers, made.cluster.hybrid_workers),
    }
    return {name: str(value) for name, (before, value) in found.items() if value != before}


def step_parts(plan: Plan, snapshot: PlanningSnapshot) -> StepParts:
    tp = max(bucket.tp for bucket in plan.buckets)
    engine = (snapshot.engines or {}).get(tp) or engine_seconds(snapshot.gpu, snapshot.shape, tp)
    longest = int(rollout_cost(snapshot.workload, engine).alone_s.argmax())
    return StepParts(
        gpus=plan.num_gpus, train_gpus=plan.training.gpus, eta=plan.eta, rollout_s=plan.rollout_s, train_s=plan.train_s,
        update_s=plan.update_s, beside_s=plan.beside_s, throughput_s=plan.bounds.throughput_s, longest_s=plan.bounds.longest_s,
        tool_s=float(snapshot.workload.tool_wait_s[longest]), needed_gpus=plan.needed_gpus,
    )  # fmt: skip


def obstacles(config: RunConfig, plan: Plan, snapshot: PlanningSnapshot) -> dict[str, str]:
    """Step modes that ``config`` cannot use with the layout of ``plan``, with the reasons."""
    if (streams := streaming_obstacle(config)) is not None:
        return {STREAMING: streams, TURNING: streams}
    try:
        laid = _laid_out(config, plan)
    except ConfigError as error:  # a plan too large to run (--what-if)
        return {TURNING: str(error)}
    try:
        with_way(laid, TURNING)
    except ConfigError as error:
        return {TURNING: turning_obstacle(_turning(laid)) or str(error)}
    alone = memory_parts_bytes(snapshot.shape, snapshot.workload.final_context_tokens, 1, snapshot.training)
    needs, gpu = sum(alone.values()) - alone["optimizer"], snapshot.gpu  # the core takes the optimizer's step
    if needs <= gpu.memory_bytes or snapshot.training.on_cpu:
        return {}
    sizes = f"{needs / 1e9:.0f} GB, and a {gpu.name} has {gpu.memory_bytes / 1e9:.0f} GB"
    return {TURNING: f"the gradients of an engine's GPU would take {sizes}"}


def with_way(config: RunConfig, way: str) -> RunConfig:
    """``config`` set to a step mode (``split`` changes nothing). Raises ConfigError on conflict."""
    if way == SPLIT:
        return config
    values = config.model_dump()
    # "auto" is kept: the run starts in the planned mode, and measures
    values["trainer"]["streaming"] = "auto" if config.trainer.streaming == "auto" else "on"
    if way == TURNING:
        values["trainer"]["turning"] = "auto" if config.trainer.turning == "auto" else "on"
        values["cluster"]["hybrid_workers"] = config.cluster.hybrid_workers or _engines(config)
    return config_from_dict(values)


def _laid_out(config: RunConfig, plan: Plan) -> RunConfig:
    values = config.model_dump()
    engines = [{"tp": bucket.tp, "count": bucket.engines, "slots": bucket.concurrency} for bucket in plan.buckets]
    values["cluster"] |= {"train_workers": plan.training.gpus, "engines": engines, "rollout_workers": 1}
    values["planner"] |= {"layout": "configured", "planned": None}
    return config_from_dict(values)


def _engines(config: RunConfig) -> int:
    return sum(group.count for group in config.cluster.engines) or config.cluster.rollout_workers


def _turning(config: RunConfig) -> RunConfig:
    trainer = config.trainer.model_copy(update={"streaming": "on", "turning": "on"})
    cluster = config.cluster.model_copy(update={"hybrid_workers": config.cluster.hybrid_workers or _engines(config)})
    return config.model_copy(update={"trainer": trainer, "cluster": cluster})


def read_trace(path: Path, tool_s: float) -> TrajectoryTotals:
    """Totals from a CSV of turns. Raises ConfigError if unreadable, PlanError without a column."""
    return totals_of_trace(read_agent_turns(path, TRACE_COLUMNS, "planner.trace (--trace FILE)"), tool_s)


MOST_RANKS_PER_CORE = 4
"""Maximum workers per core of a machine without GPUs: more would not start in time."""


def laid_out(config: RunConfig, machine: Machine | None = None, *, started_here: bool = True) -> RunConfig:
    """``config`` as a run starts it on ``machine`` (default: this one), planned if ``layout=auto``.

    ``started_here``: with its own workers. Raises ConfigError or PlanError if it cannot start.
    """
    section, started_here = config.planner, started_here and config.cluster.scheduler is None
    if started_here and config.cluster.device == "cuda":
        machine = machine or this_machine()
        if machine.num_gpus == 0:
            raise ConfigError(
                "cluster.device: cuda, and this machine has no GPU that torch sees (driver, CUDA_VISIBLE_DEVICES, or a torch for "
                "CPUs); type cluster.device=auto"
            )
    if section.layout == "configured":
        if started_here and (section.planned is not None or config.cluster.engines):
            _check_here(config, machine or this_machine())
        return config
    if not started_here:
        raise ConfigError(
            "planner.layout: auto starts the workers that it plans, and this run uses a cluster with its own; type "
            "planner.layout=configured"
        )
    machine = machine or this_machine()
    config, rests_on = _on(config, machine)
    made = with_plan(config, plan_layout(config, machine.gpu, rests_on))
    _check_here(made, machine)
    return made


def plan_layout(config: RunConfig, gpu: str, rests_on: str, turns: TrajectoryTotals | None = None) -> PlannedLayout:
    """The plan that a run starts on ``gpu``; ``turns`` default to `planner.trace`, or are drawn."""
    if turns is None and config.planner.trace is not None:
        turns = read_trace(config.planner.trace, config.planner.lengths["tool_s"])
    snapshot, _ = snapshot_of(config, turns, what_if=False, on_cores=gpu == CPU)
    floor = max(config.rollout.max_context_tokens, config.trainer.max_row_tokens)
    plan, micro_batch_tokens = planned(snapshot, floor, may_grow=gpu != CPU)
    layout = layout_of(plan, snapshot.shape, micro_batch_tokens, gpu, rests_on)
    found = planned_regime(config, plan, snapshot)
    return msgspec.structs.replace(layout, way=found.choice, way_why=found.words)


def check_workers(config: RunConfig, client: Client) -> None:
    """Raise PlanError if the plan is for other hardware than the cluster's workers have."""
    layout = config.planner.planned
    if layout is not None:  # check_cluster counts them by kind
        check_planned(layout, shape_of(config), cluster_gpu(client), layout.num_gpus)


def _check_here(config: RunConfig, machine: Machine) -> None:
    layout, groups = config.planner.planned, config.cluster.engines
    if layout is not None:
        check_planned(layout, shape_of(config), machine.gpu, machine.num_gpus)
    for group in groups:
        if group.tp > 1:
            try:
                shape = shape_of(config)
            except ModelError:  # a model whose sizes the planner does not know: the engine checks it
                break
            try:
                shape.check_tp(group.tp)
            except ConfigError as error:
                raise ConfigError(f"cluster.engines: {error}; type another tp") from error
    gpus = sum(group.tp * group.count for group in groups)
    if config.rollout.engine == "vllm" and 0 < machine.num_gpus < gpus:
        raise ConfigError(
            f"cluster.engines: its engines take {gpus} GPUs, and this machine has {machine.num_gpus} x {machine.gpu}; list fewer, "
            "or start them on another cluster (--scheduler)"
        )


def _on(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    section = config.planner
    number = section.num_gpus or machine.ranks(config.cluster.threads)
    what = ("GPU" if machine.num_gpus else "rank") + ("s" if number != 1 else "")
    what += "" if machine.num_gpus else " (a rank is a worker on CPU cores)"
    if machine.num_gpus and number > machine.num_gpus:
        raise PlanError(
            f"planner.num_gpus: a layout for {number} GPUs, and this machine has {machine.num_gpus} x {machine.gpu}; type "
            f"planner.num_gpus={machine.num_gpus}, or start it on a cluster: libra plan CONFIG --write FILE, libra cluster slurm "
            "FILE up"
        )
    if number < 2:
        more = "planner.layout=configured, which shares it" if machine.num_gpus else "planner.num_gpus=2"
        raise PlanError(
            f"planner.num_gpus: {number} {what} cannot be divided between training and rollout, which take at least one each; "
            f"type {more}"
        )
    if machine.gpu == CPU and number > MOST_RANKS_PER_CORE * machine.cores:
        raise PlanError(
            f"planner.num_gpus: {number} ranks, and this machine has {machine.cores} cores; type planner.num_gpus="
            f"{MOST_RANKS_PER_CORE * machine.cores} or less, or start it on a cluster: libra plan CONFIG --write FILE, libra "
            "cluster slurm FILE up"
        )
    gpu, rests_on = _seconds(config, machine)
    threads = config.cluster.threads or machine.cores
    if machine.gpu == CPU and number * threads > machine.cores:
        rests_on += (
            f"; {number} ranks of {threads} threads share {machine.cores} cores, which the seconds do not allow for"
        )
    values: dict[str, Any] = {"num_gpus": number, "gpu": gpu}
    return config.model_copy(update={"planner": section.model_copy(update=values)}), rests_on


def _seconds(config: RunConfig, machine: Machine) -> tuple[str | None, str]:
    section = config.planner
    wanted = None if section.gpu is None else planned_gpu(section.gpu).name
    there: str | None = None
    unknown = ""
    try:
        there = load_gpu(machine.gpu).name
    except ConfigError as error:
        unknown = str(error)
    if section.calibration is not None:
        gpu = section.gpu or there
        return gpu, calibrated_rests_on(section.calibration, planned_gpu(gpu).name)
    if machine.gpu == CPU and wanted is None:
        raise PlanError(
            "planner.layout: auto needs the speed of this machine, which has no GPU and was not measured; type "
            "libra calibrate RUN --save FILE and planner.calibration=FILE, or planner.gpu=NAME for the proportions of that GPU"
        )
    if machine.gpu == CPU:
        return section.gpu, f"datasheet and tables of {wanted}, not this machine: proportions may hold, seconds do not"
    if wanted is None and there is None:
        raise PlanError(
            f"planner.gpu: Libra has no datasheet of this machine's GPU, {machine.gpu!r} ({unknown}); type planner.gpu=FILE with "
            "one (docs/planning.md)"
        )
    if wanted is None:
        return there, f"datasheet and tables of {machine.gpu}, which this machine has"
    if wanted != machine.gpu and there is not None:
        raise PlanError(
            f"planner.gpu: {wanted}, and this machine has {machine.num_gpus} x {machine.gpu}; type planner.gpu={machine.gpu}, or "
            "leave it out"
        )
    return section.gpu, f"datasheet and tables of {wanted}, which planner.gpu names for this machine's {machine.gpu}"


def plan_for_datasheet(config: RunConfig, turns: TrajectoryTotals | None = None) -> PlannedLayout:
    """`plan_layout` for the hardware that section ``planner`` names."""
    calibration, sheet = config.planner.calibration, planned_gpu(config.planner.gpu).name
    rests_on = f"datasheet and tables of {sheet}" if calibration is None else calibrated_rests_on(calibration, sheet)
    return plan_layout(without_layout(config), planned_hardware(config), rests_on, turns)


def planned_hardware(config: RunConfig) -> str:
    """Name of the GPU that section ``planner`` means; `CPU` for a calibrated machine without."""
    if config.planner.calibration is not None and config.planner.gpu is None:
        return this_machine().gpu
    return planned_gpu(config.planner.gpu).name


def without_layout(config: RunConfig) -> RunConfig:
    planner = config.planner.model_copy(update={"layout": "configured", "planned": None})
    return config.model_copy(update={"planner": planner})


def layout_fact(layout: PlannedLayout) -> LayoutPlanned:
    return LayoutPlanned(
        model=layout.model,
        gpu=layout.gpu,
        num_gpus=layout.num_gpus,
        train_gpus=layout.train_gpus,
        engines=tuple((engines.tp, engines.count, engines.concurrency) for engines in layout.engines),
        boundaries=tuple(layout.boundaries),
        micro_batch_tokens=layout.micro_batch_tokens,
        step_s=layout.step_s,
        rests_on=layout.rests_on,
        reason=layout.why,
        lost=tuple(layout.lost),
    )
