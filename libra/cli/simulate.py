"""``libra simulate``: a configuration or a recorded run in virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from libra.config.load import RunConfig
from libra.config.model_paths import resolve_model
from libra.errors import ConfigError
from libra.planner.from_config import planned_gpu
from libra.sim.configured import REPLACED, drawn_workload, layout_of, simulator_of, simulator_of_run
from libra.sim.from_run import RunSetting, left_out, run_setting
from libra.sim.simulation_options import SimulationResult
from libra.sim.simulator import Simulator
from libra.sim.workload import Workload, load_workload


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

    ``overrides`` are the typed settings in ``config``; they replace settings of a recorded run.
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
    layout, calibration = layout_of(config), config.planner.calibration
    gpu, model = config.planner.gpu or planned_gpu(None).name, str(resolve_model(config.model.path))
    if as_json:
        asked = config.simulation.model_dump(mode="json") | {
            "policy": config.policy.name,
            "objective": config.policy.objective,
            "gpu": gpu,
            "model": model,
            "calibration": None if calibration is None else str(calibration),
            "layout": {f"tp{tp}": count for tp, count in layout.items()},
        }
        click.echo(json.dumps({"simulation": asked, "source": source, "seed": config.run.seed, **outcome.row()}))
        return
    shown = " + ".join(f"{count} x tp{tp}" for tp, count in layout.items())
    engines = f"{Path(model).name} on {gpu}" if calibration is None else f"as {calibration} measured"
    head = f"{outcome.trajectories} trajectories, {outcome.turns} turns ({source}); {engines}, {shown}; {config.policy.name}"
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
    """Typed settings that a recorded run cannot take (not in `REPLACED`) are reported."""
    names = {override: override.partition("=")[0].strip() for override in overrides}
    typed = frozenset(names.values()) & REPLACED
    _save(setting.workload, save_workload)
    simulator, is_own = simulator_of_run(setting, config, typed)
    outcome, realised, source = simulator.run(), setting.realised, setting.record.directory
    missing = left_out(setting.record.config)
    if as_json:
        own = [
            {"worker": e.worker, "engine": e.engine, "tp": e.tp, "slots": e.slots} for e in setting.calibration.engines
        ]
        document = {
            "source": str(source),
            "given": sorted(typed),
            "left_out": missing,
            "engines": own if is_own else [spec.name for spec in simulator.engines],
            "realised": None if realised is None else {**realised._asdict(), "rollout_s": list(realised.rollout_s)},
            "seed": config.run.seed,
            **outcome.row(),
        }
        click.echo(json.dumps(document))
        return
    policy = (config if "policy.name" in typed else setting.record.config).policy.name
    given = ", ".join(override for override, name in names.items() if name in typed)
    ignored = ", ".join(override for override, name in names.items() if name not in typed)
    lines = [
        f"{outcome.trajectories} trajectories, {outcome.turns} turns (of {source}); {policy}",
        _engine_line(setting, simulator, is_own),
        f"overrides: {given}; all other settings are the run's" if given else "all settings are the run's",
        *([f"without effect on a recorded run: {ignored}"] if ignored else []),
        *([missing] if missing else []),
        *_lines(outcome),
        _compared(setting, outcome),
    ]
    click.echo("\n".join(lines))


def _engine_line(setting: RunSetting, simulator: Simulator, is_own: bool) -> str:
    if not is_own:
        return f"engines: {', '.join(spec.name for spec in simulator.engines)}, instead of the run's"
    counts = Counter(f"tp{spec.tp} with {spec.slots} slots" for spec in simulator.engines)
    engines = " + ".join(f"{count} x {name}" for name, count in counts.items())
    error = max(engine.steps.error_frac for engine in setting.calibration.engines)
    how = f"by their declared capacity (error at most {100 * error:.0f} % of a pass)"
    return f"engines of {setting.calibration.model}: {engines}, {how}"


def _compared(setting: RunSetting, outcome: SimulationResult) -> str:
    realised = setting.realised
    if realised is None:
        return "the run        was resumed, or stopped during an iteration: no comparison"
    return (
        f"the run       {realised.makespan_s:10.1f} s to its last trajectory and {realised.moves} moves; predicted / realised "
        f"seconds {outcome.makespan_s / realised.makespan_s:.3f}"
    )


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
