"""``libra plan``: the plan for a configuration, as text or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from libra.config import RunConfig, load_config, yaml_text
from libra.config.model_paths import packaged_config
from libra.config.planner import PlannedLayout
from libra.config.streaming import streaming_words
from libra.driver import launch_layout
from libra.driver.launch_layout import plan_for_datasheet, planned_hardware, planned_regime, with_way, without_layout
from libra.errors import ConfigError, PlanError, shell_path
from libra.observe.metrics import read_metrics
from libra.observe.run_directory import written
from libra.planner.build_plan import compare, plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.from_config import snapshot_of
from libra.planner.plan import Alternative, Plan, alternative_line, text
from libra.planner.plan_settings import CPU, layout_lines, with_plan
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot
from libra.policy.step_ways import SPLIT
from libra.sim.from_run import workload_of_run

HEAD = "# Written by libra plan, for"
"""First words of a plan file."""


def fixed_by(snapshot: PlanningSnapshot, choice: str) -> PlanningSnapshot:
    """The snapshot with a ``--why`` choice, e.g. ``train=16``, ``tp=4``; else ConfigError."""
    key, _, value = choice.partition("=")
    degree = key.removeprefix("engines.")
    if not value.isdigit() or not (key in ("train", "tp") or (key != degree and degree.isdigit())):
        raise ConfigError(f"--why: got {choice!r}; type e.g. --why train=16, --why tp=4 or --why engines.2=8")
    number = int(value)
    if key == "train":
        return replace(snapshot, fixed_train_gpus=number)
    if key == "tp":
        return replace(snapshot, tp=(number,))
    return replace(snapshot, fixed_engines={**snapshot.fixed_engines, int(degree): number})


def print_plan(
    config: RunConfig,
    name: str,
    *,
    trace: Path | None,
    from_run: Path | None = None,
    why: Sequence[str],
    what_if: bool,
    write: Path | None,
    as_json: bool,
) -> None:
    """Plan and print; ``name`` is the typed configuration, ``write`` the file for the plan."""
    if what_if and write is not None:
        raise ConfigError(
            "--write: a run can start only what is supported, and --what-if plans more; leave one of them out"
        )
    if write is not None:
        check_writable(write)
    config, turns = batch_of(config, trace, from_run)
    snapshot, note = snapshot_of(config, turns, what_if, on_cores=planned_hardware(config) == CPU)
    planner = Planner()
    answer = plan(snapshot, planner)
    bounds = planned_regime(config, answer, snapshot)
    settings = launch_layout.settings(config, answer, bounds.choice)
    asked = [compare(snapshot, fixed_by(snapshot, choice), choice, planner) for choice in why]
    configured, not_planned = configured_workers(config, snapshot, answer, planner)
    asked += configured
    note = "\n".join(part for part in (note, streaming_words(config), not_planned) if part)
    planned = None if write is None else write_planned(config, name, write, turns)
    if as_json:
        values = answer.to_dict()
        values["notes"] = note.splitlines()
        values["regime"] = {**asdict(bounds), "settings": settings}
        values["why"] = [{"choice": other.name, **asdict(other)} for other in asked]
        values["written"] = None if write is None else str(write)
        click.echo(json.dumps(values, allow_nan=False))
        return
    typed = " ".join(f"{name}={value}" for name, value in settings.items())
    click.echo(text(answer, bounds.words + (f"; type {typed}, or --write FILE" if typed else "")))
    if asked:
        click.echo("\n".join(("\nWhy not", *map(alternative_line, asked))))
    if note:
        click.echo(f"\n{note}")
    if planned is not None and write is not None:
        click.echo("\n" + "\n".join(layout_lines(planned, config.policy.name)))
        typed = shell_path(write)
        click.echo(f"written: {write}; type libra run {typed}, or libra cluster slurm {typed} up")


def batch_of(config: RunConfig, trace: Path | None, from_run: Path | None) -> tuple[RunConfig, TrajectoryTotals | None]:
    """The configuration with ``from_run``'s trained share, and its trajectories or None."""
    if trace is not None and from_run is not None:
        raise ConfigError("--from-run: the batch is drawn from --trace already; leave one of them out")
    if from_run is not None:
        turns, trained_frac = lengths_of_run(from_run)
        section = config.planner.model_copy(update={"lengths": config.planner.lengths | {"trained_frac": trained_frac}})
        return config.model_copy(update={"planner": section}), turns
    path = trace or config.planner.trace
    return config, None if path is None else launch_layout.read_trace(path, config.planner.lengths["tool_s"])


def configured_workers(
    config: RunConfig, snapshot: PlanningSnapshot, answer: Plan, planner: Planner
) -> tuple[list[Alternative], str]:
    """The plan with the configured training workers, or the reason for having none."""
    workers = config.cluster.train_workers
    given = "train_workers" in config.cluster.model_fields_set and snapshot.fixed_train_gpus is None
    if not given or workers == answer.training.gpus:
        return [], ""
    fixed = replace(snapshot, fixed_train_gpus=workers)
    try:
        return [compare(snapshot, fixed, f"cluster.train_workers={workers}", planner)], ""
    except PlanError as error:
        return [], f"cluster.train_workers={workers} cannot be planned: {error}"


def lengths_of_run(run_dir: Path) -> tuple[TrajectoryTotals, float]:
    """Totals of a run's trajectories, and the share trained on; raises as `workload_of_run`."""
    plans = workload_of_run(run_dir).trajectories
    totals = TrajectoryTotals.of(
        [plan.prompt_tokens for plan in plans],
        [plan.new_tokens for plan in plans],
        observation_tokens=[plan.final_tokens - plan.prompt_tokens - plan.new_tokens for plan in plans],
        num_turns=[len(plan.turns) for plan in plans],
        tool_wait_s=[sum(turn.tool_s for turn in plan.turns) for plan in plans],
    )
    config = load_config(str(run_dir / "config.resolved.yaml"))
    rows = [row for row in read_metrics(run_dir) if row.get("trajectories") and "forwarded_sequences" in row]
    seen = config.trainer.epochs * sum(float(row["trajectories"]) for row in rows)
    trained = sum(float(row["forwarded_sequences"]) for row in rows)
    return totals, min(1.0, max(trained / seen, 1.0 / len(totals))) if seen else 1.0


def write_planned(config: RunConfig, name: str, file: Path, turns: TrajectoryTotals | None) -> PlannedLayout:
    """Write a file with which the plan for ``config`` starts, as a delta to the typed configuration."""
    layout = plan_for_datasheet(config, turns)
    made = with_plan(without_layout(config), layout)
    delta = written_delta(config, name, with_way(made, layout.way or SPLIT), file)
    with written(file, "--write") as path:
        path.write_text(delta, encoding="utf-8")
    return layout


def check_writable(file: Path) -> None:
    """ConfigError if the ``--write`` file is impossible, before minutes of planning."""
    if file.exists() and not (file.is_file() and file.read_text(encoding="utf-8", errors="replace").startswith(HEAD)):
        raise ConfigError(f"--write: {file} exists and is not a plan; type another name, or remove it")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--write: {file}: no directory {file.absolute().parent}; create it, or type another name")


_CHOOSES = {"environment": "name", "trainer": "algorithm"}
"""Keys whose value selects the other settings of their section."""


def written_delta(config: RunConfig, name: str, made: RunConfig, file: Path) -> str:
    """Text of a file that extends configuration ``name`` and loads as ``made``, overrides included."""
    packaged = packaged_config(name) is not None
    extended = name if packaged else os.path.relpath(Path(name).absolute(), file.absolute().parent)
    before, after = load_config(name).model_dump(mode="json"), made.model_dump(mode="json")
    values: dict[str, Any] = {"extends": extended}
    for section, fields in after.items():
        differs = {key: value for key, value in fields.items() if value != before[section][key]}
        if _CHOOSES.get(section) in differs:
            differs = fields
        if differs:
            # Nulls that no base file sets are defaults: the plan's lists need not repeat them.
            plans = section in ("cluster", "planner")
            values[section] = {key: _without_nulls(value) for key, value in differs.items()} if plans else differs
    return f"{HEAD} {name}: libra run {file.name}\n" + yaml_text.write(values)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def shown_layout(config: RunConfig) -> RunConfig:
    """``config`` as a run starts it on this machine; prints the plan that it starts, in a short block."""
    made = launch_layout.laid_out(config)
    if made.planner.planned is not None:
        click.echo("\n".join(layout_lines(made.planner.planned, made.policy.name)))
    return made
