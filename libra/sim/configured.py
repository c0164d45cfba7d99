"""A simulation as the configuration describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from libra.config.load import RunConfig
from libra.config.model_paths import resolve_model
from libra.config.service_devices import teacher_model
from libra.errors import ConfigError, ModelError
from libra.facts import boundaries_of
from libra.hardware import GPU, ModelShape, engine_seconds, load_gpu, load_shape
from libra.hardware.engine_tables import EngineTables
from libra.hardware.run_calibration import RunCalibration, read_calibration
from libra.hardware.tables import shipped_residuals
from libra.named_parts import is_named
from libra.orderings import ordering_of
from libra.planner.cost import Layout
from libra.planner.cost.training_cost import sequences_s
from libra.planner.from_config import batch_of
from libra.policy import CMLFQ, Fifo, Ordering, staleness_of
from libra.sim.from_run import RunSetting, engine_spec
from libra.sim.run_record import digest_of
from libra.sim.simulation_options import EngineSpec, SimulationOptions, fleet, slots_of
from libra.sim.simulator import Simulator
from libra.sim.workload import SIMULATED, TrajectoryPlan, TurnPlan, Workload, draw, load_traces
from libra.types import NO_TOOL, ToolStatus

CALIBRATION = "planner.calibration"
LAYOUT = Layout()
"""Training of the cost model, with gradient checkpointing."""
PASSES = 4.0
"""Forward passes that gradients cost: forward, forward again because of checkpointing, and backward, twice as long."""


def drawn_workload(config: RunConfig) -> Workload:
    """The workload of ``config``: drawn from its traces, or of the lengths that `libra plan` expects; the same seed
    draws the same."""
    section, trainer, seed = config.simulation, config.trainer, config.run.seed
    if config.planner.trace is None:
        return expected_workload(config)
    traces = load_traces(config.planner.trace, seed=seed)
    return draw(
        traces, num_groups=trainer.prompts, group_size=trainer.group_size, seed=seed, iterations=section.iterations
    )


def expected_workload(config: RunConfig) -> Workload:
    """Trajectories of the lengths in section `planner`, within the limits of section `rollout`, in an order by the seed.

    Each has `planner.lengths.turns` turns of equal length, `rollout.max_turns` at most.
    """
    section, trainer = config.simulation, config.trainer
    turns = min(config.planner.lengths["turns"], config.rollout.max_turns)
    totals, _ = batch_of(config, num=trainer.prompts * trainer.group_size, turns=turns)
    tool_s = config.planner.lengths["tool_s"]
    columns = totals.prompt_tokens, totals.generated_tokens, totals.observation_tokens
    rows = np.stack(columns, axis=1).round().astype(int)
    plans: list[TrajectoryPlan] = []
    for iteration in range(section.iterations):
        order = np.random.default_rng([config.run.seed, 0xA11, iteration]).permutation(len(rows))
        for place, at in enumerate(order.tolist()):
            prompt, generated, observed = rows[at].tolist()
            new, payloads = _parts(max(generated, turns), turns), _parts(observed, turns - 1)
            steps = tuple(
                TurnPlan(tokens, "tool", ToolStatus.OK, payload, tool_s)
                for tokens, payload in zip(new[:-1], payloads, strict=True)
            )
            last = TurnPlan(new[-1], "", NO_TOOL, 0, 0.0)
            group, sample = divmod(place, trainer.group_size)
            plans.append(TrajectoryPlan(iteration, group, sample, prompt, (*steps, last), "synthetic"))
    return Workload(SIMULATED, tuple(plans))


def _parts(total: int, number: int) -> list[int]:
    return [total // number + (part < total % number) for part in range(number)]


@dataclass(frozen=True, slots=True)
class Simulated:
    """The choices of a simulation in the sections of ``config``."""

    config: RunConfig

    @property
    def gpu(self) -> str:
        """GPU of the engines, without a calibration."""
        return self.config.planner.gpu or "A800-80G"

    @property
    def model(self) -> str:
        """Directory of the model, without a calibration."""
        return str(resolve_model(self.config.model.path))

    @property
    def layout(self) -> dict[int, int]:
        """Engines by TP degree."""
        cluster = self.config.cluster
        if not cluster.engines:
            return {self.config.rollout.tp: cluster.rollout_workers}
        counts: Counter[int] = Counter()
        for group in cluster.engines:
            counts[group.tp] += group.count
        return dict(counts)

    @property
    def slots(self) -> dict[int, int]:
        """Concurrent generations of an engine by TP degree, where `cluster.engines` gives them."""
        return {group.tp: group.slots for group in self.config.cluster.engines if group.slots is not None}

    def ordering(self) -> Ordering:
        """A new object of the policy."""
        policy = self.config.policy
        if policy.name == Fifo.name:
            return Fifo()
        learns = policy.name == CMLFQ.name or is_named(policy.name)
        options: dict[str, Any] = {"objective": policy.objective} if learns else {}
        return ordering_of(policy.name, patience=policy.patience, **options)

    def as_settings(self) -> dict[str, Any]:
        """The choices, for JSON."""
        config = self.config
        return {
            "policy": config.policy.name,
            "objective": config.policy.objective,
            "gpu": self.gpu,
            "model": self.model,
            "calibration": None if config.planner.calibration is None else str(config.planner.calibration),
            "layout": {f"tp{tp}": count for tp, count in self.layout.items()},
        }


def _gpu(choices: Simulated) -> GPU:
    """The datasheet of the engines; ConfigError names the setting."""
    try:
        return load_gpu(choices.gpu)
    except ConfigError as error:
        raise ConfigError(f"planner.gpu: {error}") from error


def _model(choices: Simulated) -> ModelShape:
    """The sizes of the model; ModelError names the setting."""
    try:
        return load_shape(choices.model)
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from error


def engines_of(choices: Simulated, layout: Mapping[int, int], workload: Workload) -> tuple[EngineSpec, ...]:
    """Engines of a layout with the seconds of a GPU's tables; slots that are not given are as many as fit at mean length."""
    gpu, model = _gpu(choices), _model(choices)
    tables = {tp: EngineTables(engine_seconds(gpu, model, tp)) for tp in layout}
    plans = workload.trajectories
    mean = sum(plan.final_tokens for plan in plans) // max(1, len(plans))
    return fleet(dict(layout), tables, {tp: choices.slots.get(tp) or slots_of(tables[tp], mean) for tp in layout})


def measured_engines(
    calibration: RunCalibration, layout: Mapping[int, int], slots: Mapping[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout as ``calibration`` measured them; ConfigError for a degree that it lacks."""
    return tuple(
        engine_spec(calibration.of_tp(tp, "cluster.engines"), f"tp{tp}-{index}", slots=slots.get(tp))
        for tp in sorted(layout)
        for index in range(layout[tp])
    )


def simulator_of(config: RunConfig, workload: Workload | None = None) -> Simulator:
    """The simulation that ``config`` describes, of a drawn workload or of the given one.

    Raises
    ------
    ConfigError
        Among others, if the calibration is of another model than ``model.path``.
    """
    section, choices = config.simulation, Simulated(config)
    workload = drawn_workload(config) if workload is None else workload
    measured, path = None, config.planner.calibration
    if path is not None:
        measured = read_calibration(path, CALIBRATION)
        measured.check_model(config.model.path, digest_of(config.model.path), CALIBRATION)
    options = SimulationOptions(
        **asdict(staleness_of(config)),
        train_s=section.train_s or 0.0,
        load_s=section.load_s or 0.0,
        tool_slots=section.tool_slots,
        chunk_tokens=config.rollout.chunk_tokens,
        residuals=shipped_residuals() if section.noise else None,
        boundaries=(boundaries_of(config.policy.boundaries_tokens) if config.policy.name == CMLFQ.name else ()),
        teacher_token_s=expected_teacher_token_s(choices, measured, workload),
    )
    if measured is None:
        engines = engines_of(choices, choices.layout, workload)
    else:
        engines = measured_engines(measured, choices.layout, choices.slots)
        options = replace(
            options,
            load_s=measured.load_s if section.load_s is None else section.load_s,
            tool_overhead=measured.tools,
            gate_s=measured.gate_s,
            commit_s=measured.commit_s,
        )
        if section.train_s is None:
            step_s = 0.0 if measured.trainer is None else measured.trainer.step_s(_tokens(workload))
            options = _with_step(config, options, step_s, measured.update_s)
    ordering = choices.ordering()
    return Simulator(workload, engines, ordering, seed=config.run.seed, options=options)


def expected_teacher_token_s(choices: Simulated, measured: RunCalibration | None, workload: Workload) -> float:
    """Seconds of a teacher's forward pass per token; 0 without one that batches wait for.

    By the cost model; with a calibration the seconds of its trainer per token, by the parameters of both models and the passes of a
    gradient, or 0 if it has none. ModelError if the teacher's sizes are not known here.
    """
    named = teacher_model(choices.config)
    if named is None or not choices.config.distil.wait_s:
        return 0.0
    try:
        teacher = load_shape(str(resolve_model(named)))
    except ModelError as error:
        raise ModelError(f"distil.teacher: {error}") from error
    tokens = np.array([float(plan.final_tokens) for plan in workload.trajectories])
    if measured is None:
        return float(sequences_s(_gpu(choices), teacher, tokens, LAYOUT).sum() / tokens.sum())
    if measured.trainer is None:
        return 0.0
    student = load_shape(str(resolve_model(choices.config.model.path)))
    passes = PASSES if choices.config.trainer.gradient_checkpointing else PASSES - 1  # which is a forward pass again
    total = float(tokens.sum())
    return measured.trainer.step_s(total) / total / passes * teacher.num_params / student.num_params


def _with_step(config: RunConfig, options: SimulationOptions, step_s: float, update_s: float) -> SimulationOptions:
    """``options`` with these seconds of a step and its weight update, which a single training worker publishes beside the
    next step."""
    beside = config.cluster.train_workers == 1 and config.run.eta > 0
    return replace(options, train_s=step_s if beside else step_s + update_s, publish_s=update_s if beside else 0.0)


def _tokens(workload: Workload) -> float:
    iterations = 1 + max(plan.iteration for plan in workload.trajectories)
    return sum(plan.final_tokens for plan in workload.trajectories) / iterations


class RunSimulation(NamedTuple):
    """A simulation of a run; ``given`` are the settings of the command line that replace the run's."""

    simulator: Simulator
    given: tuple[str, ...]
    measured: bool  # engines are as the run measured them


LAYOUT_SETTINGS = frozenset({"cluster.engines", "cluster.rollout_workers", "rollout.tp"})
REPLACED = LAYOUT_SETTINGS | {
    "model.path", "planner.gpu", "planner.calibration", "policy.name", "policy.objective", "policy.patience"
}  # fmt: skip
"""Settings beside section `simulation` that replace those of a simulated run where they are typed."""


def simulator_of_setting(config: RunConfig, setting: RunSetting, typed: Set[str]) -> RunSimulation:
    """The simulation of a run, with settings of the command line in place of the run's.

    Parameters
    ----------
    typed : set of str
        Dotted names that were given on the command line. Other settings of ``config`` are not this run's.
    """
    section, options = config.simulation, setting.options
    given = {name.removeprefix("simulation.") for name in typed if name.startswith("simulation.")}
    own = setting.record.config
    if "planner.calibration" not in typed:
        own = own.model_copy(update={"planner": own.planner.model_copy(update={"calibration": None})})
    for part, _, key in (name.partition(".") for name in sorted(typed & REPLACED)):
        replaced = getattr(own, part).model_copy(update={key: getattr(getattr(config, part), key)})
        own = own.model_copy(update={part: replaced})
    tables, laid_out, choices = bool(typed & {"planner.gpu", "model.path"}), typed & LAYOUT_SETTINGS, Simulated(own)
    layout = choices.layout if laid_out else dict(Counter(engine.tp for engine in setting.calibration.engines))
    if (path := own.planner.calibration) is not None:
        measured = read_calibration(path, CALIBRATION)
        measured.check_model(own.model.path, digest_of(own.model.path), CALIBRATION)
        engines = measured_engines(measured, layout, choices.slots)
    elif tables:
        engines = engines_of(choices, layout, setting.workload)
    elif laid_out:
        engines = measured_engines(setting.calibration, layout, choices.slots)
    else:
        engines = setting.engines
    if "train_s" in given:
        options = replace(options, train_s=section.train_s or 0.0, publish_s=0.0, steps_s=())
    if "load_s" in given:
        options = replace(options, load_s=section.load_s or 0.0)
    if "tool_slots" in given:
        options = replace(options, tool_slots=section.tool_slots)
    if "rollout.chunk_tokens" in typed:
        options = replace(options, chunk_tokens=config.rollout.chunk_tokens)
    staleness = asdict(staleness_of(config))
    options = replace(
        options, **{key: staleness[key] for key in staleness if {f"staleness.{key}", f"run.{key}"} & typed}
    )
    if section.noise and "noise" in given:
        options = replace(options, residuals=shipped_residuals())
    seed = config.run.seed if "run.seed" in typed else setting.record.config.run.seed
    ordering = choices.ordering()
    simulator = Simulator(setting.workload, engines, ordering, seed=seed, options=options)
    return RunSimulation(simulator, tuple(sorted(typed)), not tables and own.planner.calibration is None)
