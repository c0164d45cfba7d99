"""``libra simulate``: a configuration or a recorded run in virtual time, and its result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from libra.config.load import RunConfig
from libra.observe.run_directory import written
from libra.sim import SimulationResult, load_workload
from libra.sim.configured import RunSimulation, Simulated, drawn_workload, simulator_of, simulator_of_setting
from libra.sim.from_run import RunSetting, left_out, run_setting


def simulate_run(
    config: RunConfig,
    *,
    from_run: Path | None,
    workload: Path | None,
    save_workload: Path | None,
    as_json: bool,
    overrides: Sequence[str] = (),
) -> None:
    """Simulate and print; ConfigError if the workload cannot be read, written or simulated.

    ``overrides``, with which ``config`` was loaded, replace the settings of a recorded run.
    """
    if from_run is not None and workload is not None:
        raise click.UsageError("--from-run and --workload both name a workload; leave one out")
    setting = None if from_run is None else run_setting(from_run)
    if setting is not None:
        used, source = setting.workload, f"of {setting.record.directory}"
    elif workload is not None:
        used, source = load_workload(workload), f"{workload}"
    else:
        traces = config.planner.trace
        used, source = drawn_workload(config), f"drawn from {traces}" if traces else "synthetic"
    if save_workload is not None:
        with written(save_workload, "--save-workload") as file:
            file.write_text(used.to_json())
    if setting is None:
        outcome, choices, measured = simulator_of(config, used).run(), Simulated(config), config.planner.calibration
        layout = " + ".join(f"{count} x tp{tp}" for tp, count in choices.layout.items())
        engines = f"{Path(choices.model).name} on {choices.gpu}" if measured is None else f"as {measured} measured"
        lines = [f"{engines}, {layout}; {config.policy.name}", *_lines(outcome)]
    else:
        typed = frozenset(override.partition("=")[0].strip() for override in overrides)
        of_run = simulator_of_setting(config, setting, typed)
        outcome, missing = of_run.simulator.run(), left_out(setting.record.config)
        policy = (config if "policy.name" in typed else setting.record.config).policy.name
        settings = f"overrides: {', '.join(overrides)}; all other settings are" if overrides else "all settings are"
        lines = [policy, *_engine_lines(setting, of_run), f"{settings} the run's", *filter(None, [missing])]
        lines += [*_lines(outcome), _compared(setting, outcome)]
    if not as_json:
        click.echo(f"{outcome.trajectories} trajectories, {outcome.turns} turns ({source}); " + "\n".join(lines))
        return
    if setting is None:
        simulation = config.simulation.model_dump(mode="json") | choices.as_settings()
        document = {"simulation": simulation, "source": source}
    else:
        document = _document(setting, of_run)
    click.echo(json.dumps({**document, "seed": config.run.seed, **outcome.row()}))


def _engine_lines(setting: RunSetting, of_run: RunSimulation) -> list[str]:
    if not of_run.measured:
        return [f"engines: {', '.join(spec.name for spec in of_run.simulator.engines)}, instead of the run's"]
    counts = Counter(f"tp{spec.tp} with {spec.slots} slots" for spec in of_run.simulator.engines)
    engines = " + ".join(f"{count} x {name}" for name, count in counts.items())
    error = max(engine.steps.error_frac for engine in setting.calibration.engines)
    how = f"by their declared capacity (error at most {100 * error:.0f} % of a pass)"
    return [f"engines of {setting.calibration.model}: {engines}, {how}"]


def _compared(setting: RunSetting, outcome: SimulationResult) -> str:
    if (realised := setting.realised) is None:
        return "the run        was resumed, or stopped during an iteration: no comparison"
    ratio = f"predicted / realised seconds {outcome.makespan_s / realised.makespan_s:.3f}"
    return f"the run       {realised.makespan_s:10.1f} s to its last trajectory and {realised.moves} moves; {ratio}"


def _document(setting: RunSetting, of_run: RunSimulation) -> dict[str, Any]:
    engines: list[Any] = [spec.name for spec in of_run.simulator.engines]
    if of_run.measured:
        engines = [
            {name: getattr(engine, name) for name in ("worker", "engine", "tp", "slots")}
            for engine in setting.calibration.engines
        ]
    realised = setting.realised
    return {
        "source": str(setting.record.directory), "given": list(of_run.given), "left_out": left_out(setting.record.config),
        "engines": engines,
        "realised": None if realised is None else {**realised._asdict(), "rollout_s": list(realised.rollout_s)},
    }  # fmt: skip


def _lines(outcome: SimulationResult) -> list[str]:
    computed = outcome.prefilled_tokens + outcome.cached_tokens
    lines = [
        f"rollout       {outcome.makespan_s:10.1f} s to the last trajectory, {outcome.generated_tokens / outcome.makespan_s:.0f} "
        "tokens/s generated",
        f"groups        {outcome.group_completion_s:10.1f} s until a group is complete, on average",
        f"engines       {100 * outcome.busy_frac:10.1f} % of their time busy",
        f"context       {100 * outcome.cached_tokens / max(1, computed):10.1f} % from the prefix cache; "
        f"{outcome.recomputed_tokens} tokens recomputed",
        f"moves         {outcome.moves:10d} turns on another engine than the turn before",
    ]
    if len(outcome.iteration_s) > 1:
        mean = sum(outcome.iteration_s) / len(outcome.iteration_s)
        lines.append(f"iterations    {mean:10.1f} s from gate to trained, on average of {len(outcome.iteration_s)}")
    return lines
