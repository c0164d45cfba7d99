"""A simulation as the configuration describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

from libra.config.model_paths import resolve_model
from libra.config.models import RunConfig, SimulationSection
from libra.hardware import engine_seconds
from libra.hardware.run_calibration import RunCalibration, read_calibration
from libra.hardware.timing_residuals import shipped_residuals
from libra.hardware.virtual_engine import EngineTables
from libra.policy import CMLFQ, ORDERINGS, Oracle, Ordering, Predictor, boundaries_of
from libra.sim.engines import Between, EngineSpec, fleet, slots_of
from libra.sim.from_run import RunSetting, engine_spec
from libra.sim.recorded_agents import load_traces
from libra.sim.run_record import digest_of
from libra.sim.simulator import SimulationOptions, Simulator
from libra.sim.workload import Workload, draw, synthetic

CALIBRATION = "simulation.calibration"


def drawn_workload(config: RunConfig) -> Workload:
    """Trajectories as ``config`` asks for them: drawn from its traces, or made up; the same seed draws the same."""
    section, trainer = config.simulation, config.trainer
    if section.traces is None:
        return synthetic(
            trainer.prompts * trainer.group_size,
            turns=section.turns,
            seed=config.run.seed,
            iterations=section.iterations,
            group_size=trainer.group_size,
        )
    return draw(
        load_traces(section.traces, seed=config.run.seed),
        num_groups=trainer.prompts,
        group_size=trainer.group_size,
        seed=config.run.seed,
        iterations=section.iterations,
    )


def layout_of(section: SimulationSection) -> dict[int, int]:
    """Engines by TP degree."""
    return {int(name.removeprefix("tp")): count for name, count in section.layout.items()}


def engines_of(section: SimulationSection, workload: Workload) -> tuple[EngineSpec, ...]:
    """The engines of ``section.layout``, with the seconds of its GPU, and their slots."""
    layout = layout_of(section)
    tables = {tp: EngineTables(engine_seconds(section.gpu, section.model, tp)) for tp in layout}
    plans = workload.trajectories
    mean = sum(plan.final_tokens for plan in plans) // max(1, len(plans))
    slots = {tp: section.slots or slots_of(tables[tp], mean) for tp in layout}
    return fleet(layout, tables, slots)


def measured_engines(
    section: SimulationSection, calibration: RunCalibration, layout: dict[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout as ``calibration`` measured them; ConfigError for a degree that it does not know."""
    return tuple(
        engine_spec(calibration.of_tp(tp, "simulation.layout"), f"tp{tp}-{index}", slots=section.slots)
        for tp in sorted(layout)
        for index in range(layout[tp])
    )


def ordering_of(section: SimulationSection, workload: Workload, seed: int) -> Ordering:
    """The policy that ``section`` names; those that know lengths are told the workload's."""
    match section.policy:
        case "cmlfq":
            return CMLFQ(objective=section.objective)
        case "predictor":
            totals = workload.totals()
            return Predictor(totals, accuracy=section.accuracy, seed=seed, objective=section.objective)
        case "oracle":
            return Oracle(workload.totals(), objective=section.objective)
    return ORDERINGS[section.policy]()


def simulator_of(config: RunConfig, workload: Workload | None = None) -> Simulator:
    """The simulation that ``config`` describes, of a drawn workload or of the given one.

    Raises
    ------
    ConfigError
        Among others where the calibration is of another model than ``model.path``.
    """
    section = config.simulation
    workload = drawn_workload(config) if workload is None else workload
    measured = None
    if section.calibration is not None:
        measured = read_calibration(section.calibration, CALIBRATION)
        measured.check_model(config.model.path, digest_of(config.model.path), CALIBRATION)
    around = SimulationOptions(
        eta=config.run.eta,
        train_s=section.train_s or 0.0,
        load_s=section.load_s or 0.0,
        tool_slots=section.tool_slots,
        residuals=shipped_residuals() if section.noise else None,
        boundaries=(
            boundaries_of(config.policy.boundaries_tokens) if section.policy in ("cmlfq", "predictor", "oracle") else ()
        ),
    )
    if measured is None:
        engines = engines_of(section, workload)
    else:
        engines = measured_engines(section, measured, layout_of(section))
        around = replace(
            around,
            train_s=measured_step_s(measured, workload) if section.train_s is None else section.train_s,
            load_s=measured.load_s if section.load_s is None else section.load_s,
            tool_between=Between(measured.tool_transport_s, measured.tool_worker_s),
            gate_s=measured.gate_s,
            commit_s=measured.commit_s,
        )
    ordering = ordering_of(section, workload, config.run.seed)
    return Simulator(workload, engines, ordering, seed=config.run.seed, surroundings=around)


def measured_step_s(calibration: RunCalibration, workload: Workload) -> float:
    """Seconds of a step over an iteration's trajectories, with its weight update; the latter alone where no trainer was fitted."""
    if calibration.trainer is None:
        return calibration.update_s
    iterations = 1 + max(plan.iteration for plan in workload.trajectories)
    tokens = sum(plan.final_tokens for plan in workload.trajectories) / iterations
    return calibration.trainer.step_s(tokens) + calibration.update_s


class OfRun(NamedTuple):
    """A simulation of a run; ``given`` names the settings that somebody typed instead of what the run says."""

    simulator: Simulator
    given: tuple[str, ...]
    measured: bool  # engines are as the run measured them


INSTEAD = ("gpu", "model", "calibration")
"""Keys of section `simulation` that say whose engines are simulated, if not the run's."""


def simulator_of_setting(config: RunConfig, setting: RunSetting, typed: Set[str]) -> OfRun:
    """The simulation of a run, with what was typed for it instead of what the run says.

    Parameters
    ----------
    typed : set of str
        Dotted names that were given on the command line. What stands in a file describes other simulations than this run's.
    """
    section, around = config.simulation, setting.surroundings
    given = {name.removeprefix("simulation.") for name in typed if name.startswith("simulation.")}
    tables = bool(given & set(INSTEAD))
    if "layout" not in given:  # as many of each degree as the run had
        degrees = Counter(f"tp{engine.tp}" for engine in setting.calibration.engines)
        section = section.model_copy(update={"layout": dict(degrees)})
    if "gpu" in given and "model" not in given:  # the run's own model on that GPU
        section = section.model_copy(update={"model": str(resolve_model(setting.record.config.model.path))})
    if section.calibration is not None and "calibration" in given:
        measured = read_calibration(section.calibration, CALIBRATION)
        path = setting.record.config.model.path
        measured.check_model(path, digest_of(path), CALIBRATION)
        engines = measured_engines(section, measured, layout_of(section))
    elif tables:
        engines = engines_of(section, setting.workload)
    elif "layout" in given:
        engines = measured_engines(section, setting.calibration, layout_of(section))
    else:
        engines = tuple(
            spec._replace(slots=section.slots, told=()) if "slots" in given and section.slots else spec
            for spec in setting.engines
        )
    if "train_s" in given:
        around = replace(around, train_s=section.train_s or 0.0, steps_s=())
    if "load_s" in given:
        around = replace(around, load_s=section.load_s or 0.0)
    if "tool_slots" in given:
        around = replace(around, tool_slots=section.tool_slots)
    if "run.eta" in typed:
        around = replace(around, eta=config.run.eta)
    if section.noise and "noise" in given:
        around = replace(around, residuals=shipped_residuals())
    seed = config.run.seed if "run.seed" in typed else setting.record.config.run.seed
    ordering = ordering_of(section, setting.workload, seed) if given & {"policy", "objective"} else setting.ordering()
    simulator = Simulator(setting.workload, engines, ordering, seed=seed, surroundings=around)
    return OfRun(simulator, tuple(sorted(typed)), not tables)
