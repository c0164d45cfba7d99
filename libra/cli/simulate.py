"""``libra simulate``: a configuration in virtual time, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from libra.config.models import RunConfig
from libra.errors import ConfigError
from libra.sim import Outcome, load_workload
from libra.sim.from_run import workload_of_run
from libra.sim.setting import drawn_workload, simulator_of
from libra.sim.workload import Workload


def simulate_run(
    config: RunConfig, *, from_run: Path | None, workload: Path | None, save_workload: Path | None, as_json: bool
) -> None:
    """Simulate and print; ConfigError where the workload cannot be read, written or run."""
    if from_run is not None and workload is not None:
        raise click.UsageError("--from-run and --workload both say what to simulate; leave one out")
    if from_run is not None:
        what, source = workload_of_run(from_run), f"the trajectories of {from_run}"
    elif workload is not None:
        what, source = load_workload(workload), f"{workload}"
    else:
        traces = config.simulation.traces
        what, source = drawn_workload(config), f"drawn from {traces}" if traces else "made up"
    if save_workload is not None:
        try:
            save_workload.write_text(what.to_json())
        except OSError as error:
            raise ConfigError(f"--save-workload {save_workload}: {error.strerror or error}") from error
    outcome = simulator_of(config, what).run()
    if as_json:
        section = config.simulation.model_dump(mode="json")
        click.echo(json.dumps({"simulation": section, "source": source, "seed": config.run.seed, **outcome.row()}))
    else:
        click.echo("\n".join(_lines(config, what, source, outcome)))


def _lines(config: RunConfig, workload: Workload, source: str, outcome: Outcome) -> list[str]:
    section = config.simulation
    layout = " + ".join(f"{count} x {name}" for name, count in section.layout.items())
    computed = outcome.prefilled_tokens + outcome.cached_tokens
    lines = [
        f"{outcome.trajectories} trajectories, {outcome.turns} turns ({source}); {section.model} on {section.gpu}, {layout}; "
        f"{section.policy}",
        f"rollout       {outcome.makespan_s:10.1f} s to the last trajectory, {outcome.generated_tokens / outcome.makespan_s:.0f} "
        "tokens/s generated",
        f"groups        {outcome.group_completion_s:10.1f} s until one is complete, on average",
        f"engines       {100 * outcome.busy_frac:10.1f} % of their time busy",
        f"context       {100 * outcome.cached_tokens / max(1, computed):10.1f} % was in the prefix cache; "
        f"{outcome.recomputed_tokens} tokens were computed again",
        f"moves         {outcome.moves:10d} turns began on another engine than the one before",
    ]
    if len(outcome.iteration_s) > 1:
        mean = sum(outcome.iteration_s) / len(outcome.iteration_s)
        lines.append(f"iterations    {mean:10.1f} s from gate to trained, on average of {len(outcome.iteration_s)}")
    return lines
