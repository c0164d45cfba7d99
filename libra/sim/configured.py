"""Simulations from a configuration, or from a past run with typed settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from libra.config.load import RunConfig
from libra.config.planner import SimulationSection
from libra.config.service_devices import teacher_model
from libra.facts import boundaries_of
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.hardware.run_calibration import RunCalibration
from libra.hardware.tables import shipped_residuals
from libra.named_parts import is_named
from libra.planner.cost import Layout
from libra.planner.cost.training_cost import sequences_s
from libra.planner.from_config import batch_of, configured_calibration, known_shape, planned_gpu
from libra.policy import CMLFQ, Fifo, Ordering, staleness_of
from libra.sim.from_run import RunSetting, engine_spec, run_options
from libra.sim.simulation_options import EngineSpec, SimulationOptions, fleet, slots_of
from libra.sim.simulator import Simulator
from libra.sim.workload import SIMULATED, TrajectoryPlan, TurnPlan, Workload, draw, load_traces
from libra.types import NO_TOOL, ToolStatus
from libra.user_orderings import ordering_of

LAYOUT = Layout()
"""Training layout for the cost model, with gradient checkpointing."""
PASSES = 4.0
"""Gradients in forward passes: forward, recomputed forward, backward (two)."""
LAYOUT_SETTINGS = frozenset({"cluster.engines", "cluster.rollout_workers", "rollout.tp"})
REPLACED = LAYOUT_SETTINGS | {
    "model.path", "planner.gpu", "planner.calibration", "policy.name", "policy.objective", "policy.patience", "run.eta",
    "run.seed", "rollout.chunk_tokens", "staleness.over_age", "staleness.window",
    "simulation.train_s", "simulation.load_s", "simulation.tool_slots", "simulation.noise",
}  # fmt: skip
"""Typed settings that replace those of a simulated run; other settings have no effect on it."""


def drawn_workload(config: RunConfig) -> Workload:
    """Workload sampled from traces, or with the lengths of `libra plan`; fixed by the seed."""
    section, trainer, seed = config.simulation, config.trainer, config.run.seed
    if config.planner.trace is None:
        return expected_workload(config)
    traces = load_traces(config.planner.trace, seed=seed)
    return draw(
        traces, num_groups=trainer.prompts, group_size=trainer.group_size, seed=seed, iterations=section.iterations
    )


def expected_workload(config: RunConfig) -> Workload:
    """Trajectories with the lengths of section `planner`, within the limits of section `rollout`.

    Each has `planner.lengths.turns` equal turns, at most `rollout.max_turns`; the seed sets their
    order.
    """
    trainer, tool_s = config.trainer, config.planner.lengths["tool_s"]
    turns = min(config.planner.lengths["turns"], config.rollout.max_turns)
    totals, _ = batch_of(config, num=trainer.prompts * trainer.group_size, turns=turns)
    columns = totals.prompt_tokens, totals.generated_tokens, totals.observation_tokens
    rows = np.stack(columns, axis=1).round().astype(int)
    plans: list[TrajectoryPlan] = []
    for iteration in range(config.simulation.iterations):
        order = np.random.default_rng([config.run.seed, 0xA11, iteration]).permutation(len(rows))
        for place, at in enumerate(order.tolist()):
            prompt, generated, observed = rows[at].tolist()
            *new, last = _parts(max(generated, turns), turns)
            steps = [
                TurnPlan(tokens, "tool", ToolStatus.OK, payload, tool_s)
                for tokens, payload in zip(new, _parts(observed, turns - 1), strict=True)
            ]
            group, sample = divmod(place, trainer.group_size)
            ends = TurnPlan(last, "", NO_TOOL, 0, 0.0)
            plans.append(TrajectoryPlan(iteration, group, sample, prompt, (*steps, ends), "synthetic"))
    return Workload(SIMULATED, tuple(plans))


def _parts(total: int, number: int) -> list[int]:
    return [total // number + (part < total % number) for part in range(number)]


def layout_of(config: RunConfig) -> dict[int, int]:
    """Number of engines by TP degree."""
    cluster, counts = config.cluster, Counter[int]()
    for group in cluster.engines:
        counts[group.tp] += group.count
    return dict(counts) or {config.rollout.tp: cluster.rollout_workers}


def configured_ordering(config: RunConfig) -> Ordering:
    """A new policy object from a configuration."""
    policy = config.policy
    if policy.name == Fifo.name:
        return Fifo()
    learns = policy.name == CMLFQ.name or is_named(policy.name)
    options: dict[str, Any] = {"objective": policy.objective} if learns else {}
    return ordering_of(policy.name, patience=policy.patience, **options)


def simulated_engines(
    config: RunConfig, layout: Mapping[int, int], workload: Workload, measured: RunCalibration | None
) -> tuple[EngineSpec, ...]:
    """Engines by measured times, else GPU tables; ConfigError for an unmeasured degree.

    Slots come from `cluster.engines`, else the measured engine, else as many as fit at mean length.
    """
    slots = {group.tp: group.slots for group in config.cluster.engines if group.slots is not None}
    if measured is not None:
        return tuple(
            engine_spec(measured.of_tp(tp, "cluster.engines"), f"tp{tp}-{index}", slots=slots.get(tp))
            for tp in sorted(layout)
            for index in range(layout[tp])
        )
    gpu, shape = planned_gpu(config.planner.gpu), known_shape(config.model.path, "model.path")
    tables = {tp: EngineTables(engine_seconds(gpu, shape, tp)) for tp in layout}
    plans = workload.trajectories
    mean = sum(plan.final_tokens for plan in plans) // max(1, len(plans))
    return fleet(dict(layout), tables, {tp: slots.get(tp) or slots_of(tables[tp], mean) for tp in layout})


def simulator_of(config: RunConfig, workload: Workload | None = None) -> Simulator:
    """The simulation that ``config`` describes, of a drawn workload or of the given one.

    ConfigError for invalid settings, for example a calibration of another model than
    ``model.path``.
    """
    section, measured = config.simulation, configured_calibration(config)
    workload = drawn_workload(config) if workload is None else workload
    options = SimulationOptions(
        **asdict(staleness_of(config)),
        chunk_tokens=config.rollout.chunk_tokens,
        boundaries=(boundaries_of(config.policy.boundaries_tokens) if config.policy.name == CMLFQ.name else ()),
        teacher_token_s=expected_teacher_token_s(config, measured, workload),
    )
    if measured is not None:
        iterations = 1 + max(plan.iteration for plan in workload.trajectories)
        tokens = sum(plan.final_tokens for plan in workload.trajectories) / iterations
        step_s = 0.0 if measured.trainer is None else measured.trainer.step_s(tokens)
        beside = config.cluster.train_workers == 1 and config.run.eta > 0  # the update overlaps the next step
        options = replace(
            options,
            train_s=step_s if beside else step_s + measured.update_s,
            publish_s=measured.update_s if beside else 0.0,
            load_s=measured.load_s,
            tool_overhead=measured.tools,
            gate_s=measured.gate_s,
            commit_s=measured.commit_s,
        )
    engines = simulated_engines(config, layout_of(config), workload, measured)
    options = replace(_with_section(options, section), tool_slots=section.tool_slots)
    return Simulator(workload, engines, configured_ordering(config), seed=config.run.seed, options=options)


def _with_section(options: SimulationOptions, section: SimulationSection) -> SimulationOptions:
    if section.train_s is not None:
        options = replace(options, train_s=section.train_s, publish_s=0.0, steps_s=())
    if section.load_s is not None:
        options = replace(options, load_s=section.load_s)
    return replace(options, residuals=shipped_residuals()) if section.noise else options


def simulator_of_run(
    setting: RunSetting, config: RunConfig | None = None, typed: Set[str] = frozenset()
) -> tuple[Simulator, bool]:
    """The simulation of a run, and whether its engines have the run's measured times.

    ``typed`` are dotted names from the command line; those in `REPLACED` are taken from ``config``.
    """
    own = setting.record.config
    planner = own.planner.model_copy(update={"calibration": None})
    own = own.model_copy(update={"planner": planner, "simulation": SimulationSection()})
    for part, _, key in (name.partition(".") for name in sorted(typed & REPLACED)):
        replaced = getattr(own, part).model_copy(update={key: getattr(getattr(config, part), key)})
        own = own.model_copy(update={part: replaced})
    options = _with_section(run_options(setting, own), own.simulation)
    if "simulation.tool_slots" in typed:
        options = replace(options, tool_slots=own.simulation.tool_slots)
    given = configured_calibration(own)
    is_own = given is None and not typed & {"planner.gpu", "model.path"}
    engines = setting.engines
    if typed & LAYOUT_SETTINGS or not is_own:
        measured = setting.calibration if is_own else given
        own_layout = Counter(engine.tp for engine in setting.calibration.engines)
        layout = layout_of(own) if typed & LAYOUT_SETTINGS else own_layout
        engines = simulated_engines(own, layout, setting.workload, measured)
    ordering = configured_ordering(own)
    return Simulator(setting.workload, engines, ordering, seed=own.run.seed, options=options), is_own


def expected_teacher_token_s(config: RunConfig, measured: RunCalibration | None, workload: Workload) -> float:
    """Seconds of a teacher's forward pass per token; 0 without a teacher that batches wait for.

    From the cost model; with a calibration, from its trainer's seconds per token, scaled by
    parameters and passes (0 without a trainer). ModelError if the teacher's sizes are unknown here.
    """
    named = teacher_model(config)
    if named is None or not config.distil.wait_s:
        return 0.0
    teacher = known_shape(named, "distil.teacher")
    tokens = np.array([float(plan.final_tokens) for plan in workload.trajectories])
    total = float(tokens.sum())
    if measured is None:
        return float(sequences_s(planned_gpu(config.planner.gpu), teacher, tokens, LAYOUT).sum() / total)
    if measured.trainer is None:
        return 0.0
    student = known_shape(config.model.path, "model.path")
    passes = PASSES if config.trainer.gradient_checkpointing else PASSES - 1  # checkpointing repeats the forward pass
    return measured.trainer.step_s(total) / total / passes * teacher.num_params / student.num_params
