"""A simulation as the configuration describes it."""

from __future__ import annotations

from libra.config.models import RunConfig, SimulationSection
from libra.hardware import engine_seconds
from libra.hardware.residuals import shipped_residuals
from libra.hardware.virtual_engine import EngineTables
from libra.policy import CMLFQ, ORDERINGS, Oracle, Ordering, Predictor, boundaries_of
from libra.sim.fleet import EngineSpec, fleet, slots_of
from libra.sim.simulator import Simulator, Surroundings
from libra.sim.traces import load_traces
from libra.sim.workload import Workload, draw, synthetic


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


def engines_of(section: SimulationSection, workload: Workload) -> tuple[EngineSpec, ...]:
    """The engines of ``section.layout``, with their seconds and slots."""
    layout = {int(name.removeprefix("tp")): count for name, count in section.layout.items()}
    tables = {tp: EngineTables(engine_seconds(section.gpu, section.model, tp)) for tp in layout}
    plans = workload.trajectories
    mean = sum(plan.final_tokens for plan in plans) // max(1, len(plans))
    slots = {tp: section.slots or slots_of(tables[tp], mean) for tp in layout}
    return fleet(layout, tables, slots)


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
    """The simulation that ``config`` describes, of a drawn workload or of the given one."""
    section = config.simulation
    workload = drawn_workload(config) if workload is None else workload
    around = Surroundings(
        eta=config.run.eta,
        train_s=section.train_s,
        load_s=section.load_s,
        tool_slots=section.tool_slots,
        residuals=shipped_residuals() if section.noise else None,
        boundaries=(
            boundaries_of(config.policy.boundaries_tokens) if section.policy in ("cmlfq", "predictor", "oracle") else ()
        ),
    )
    ordering = ordering_of(section, workload, config.run.seed)
    engines = engines_of(section, workload)
    return Simulator(workload, engines, ordering, seed=config.run.seed, surroundings=around)
