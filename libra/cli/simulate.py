"""``libra simulate``: a configuration or a recorded run in virtual time, and its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from libra.config.load import RunConfig
from libra.errors import ConfigError
from libra.sim import SimulationResult, load_workload
from libra.sim.configured import RunSimulation, Simulated, drawn_workload, simulator_of, simulator_of_setting
from libra.sim.from_run import RunSetting, left_out, run_setting
from libra.sim.workload import Workload


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

    ``overrides`` are those that ``config`` was loaded with; they replace the settings of a recorded run.
    """
    if from_run is not None and workload is not None:
        raise click.UsageError("--from-run and --workload both name a workload; leave one out")
    if from_run is not None:
        _simulate_of_run(config, run_setting(from_run), save_workload, as_json, overrides)
        return
    if workload is not None:
        what, source = load_workload(workload), f"{workload}"
    else:
        traces = config.planner.trace
        what, source = drawn_workload(config), f"drawn from {traces}" if traces else "synthetic"
    _save(what, save_workload)
    outcome = simulator_of(config, what).run()
    choices = Simulated(config)
    if as_json:
        asked = config.simulation.model_dump(mode="json") | choices.as_settings()
        click.echo(json.dumps({"simulation": asked, "source": source, "seed": config.run.seed, **outcome.row()}))
        return
    layout = " + ".join(f"{count} x tp{tp}" for tp, count in choices.layout.items())
    engines = (
        f"{Path(choices.model).name} on {choices.gpu}"
        if config.planner.calibration is None
        else f"as {config.planner.calibration} measured"
    )
    head = f"{outcome.trajectories} trajectories, {outcome.turns} turns ({source}); {engines}, {layout}; {config.policy.name}"
    click.echo("\n".join([head, *_lines(outcome)]))


def _save(workload: Workload, path: Path | None) -> None:
    if path is not None:
        try:
            path.write_text(workload.to_json())
        except OSError as error:
            raise ConfigError(f"--save-workload {path}: {error.strerror or error}") from error


def _simulate_of_run(
    config: RunConfig, setting: RunSetting, save_workload: Path | None, as_json: bool, overrides: Sequence[str]
) -> None:
    typed = frozenset(override.partition("=")[0].strip() for override in overrides)
    _save(setting.workload, save_workload)
    of_run = simulator_of_setting(config, setting, typed)
    outcome = of_run.simulator.run()
    if as_json:
        click.echo(json.dumps(_document(config, setting, of_run, outcome)))
        return
    policy = (config if "policy.name" in typed else setting.record.config).policy.name
    source = setting.record.directory
    lines = [
        f"{outcome.trajectories} trajectories, {outcome.turns} turns (of {source}); {policy}",
        *_engine_lines(setting, of_run),
        f"overrides: {', '.join(overrides)}; all other settings are the run's"
        if overrides
        else "all settings are the run's",
        *([missing] if (missing := left_out(setting.record.config)) else []),
        *_lines(outcome),
        *_compared(setting, outcome),
    ]
    click.echo("\n".join(lines))


def _engine_lines(setting: RunSetting, of_run: RunSimulation) -> list[str]:
    if not of_run.measured:
        return [f"engines: {', '.join(spec.name for spec in of_run.simulator.engines)}, instead of the run's"]
    counts: dict[str, int] = {}
    for spec in of_run.simulator.engines:
        name = f"tp{spec.tp} with {spec.slots} slots"
        counts[name] = counts.get(name, 0) + 1
    engines = " + ".join(f"{count} x {name}" for name, count in counts.items())
    error = max(engine.steps.error_frac for engine in setting.calibration.engines)
    how = f"by their declared capacity (error at most {100 * error:.0f} % of a pass)"
    return [f"engines of {setting.calibration.model}: {engines}, {how}"]


def _compared(setting: RunSetting, outcome: SimulationResult) -> list[str]:
    realised = setting.realised
    if realised is None:
        return ["the run        was resumed, or stopped during an iteration: no comparison"]
    return [
        f"the run       {realised.makespan_s:10.1f} s to its last trajectory and {realised.moves} moves; predicted / realised "
        f"seconds {outcome.makespan_s / realised.makespan_s:.3f}"
    ]


def _document(
    config: RunConfig, setting: RunSetting, of_run: RunSimulation, outcome: SimulationResult
) -> dict[str, Any]:
    realised = setting.realised
    return {
        "source": str(setting.record.directory),
        "given": list(of_run.given),
        "left_out": left_out(setting.record.config),
        "engines": [
            {"worker": e.worker, "engine": e.engine, "tp": e.tp, "slots": e.slots} for e in setting.calibration.engines
        ]
        if of_run.measured
        else [spec.name for spec in of_run.simulator.engines],
        "realised": None if realised is None else {**realised._asdict(), "rollout_s": list(realised.rollout_s)},
        "seed": config.run.seed,
        **outcome.row(),
    }


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
