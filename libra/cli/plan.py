"""``libra plan``: the plan that a configuration asks for, in words or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from libra.config import RunConfig
from libra.config.agent_turns import read_agent_turns
from libra.errors import ConfigError
from libra.planner.configured import snapshot_of
from libra.planner.cost import Workload
from libra.planner.explain import alternative_line, text
from libra.planner.making import compare, plan
from libra.planner.search import Planner
from libra.planner.snapshot import Snapshot
from libra.planner.trace import COLUMNS, workload_of_turns


def read_trace(path: Path, tool_s: float) -> Workload:
    """The trajectories of a CSV of turns; ConfigError where it cannot be read, PlanError where it does not say enough."""
    return workload_of_turns(read_agent_turns(path, COLUMNS, "planner.trace (--trace FILE)"), tool_s)


def fixed_by(snapshot: Snapshot, choice: str) -> Snapshot:
    """The snapshot with what ``--why`` asks about: ``train=16``, ``tp=4``, ``engines.2=8``.

    Raises
    ------
    ConfigError
        Another form.
    """
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


def print_plan(config: RunConfig, *, trace: Path | None, why: Sequence[str], what_if: bool, as_json: bool) -> None:
    """Plan and print."""
    path = trace or config.planner.trace
    turns = None if path is None else read_trace(path, config.planner.tool_s)
    snapshot, note = snapshot_of(config, turns, what_if)
    planner = Planner()
    answer = plan(snapshot, planner)
    asked = [compare(snapshot, fixed_by(snapshot, choice), choice, planner) for choice in why]
    if as_json:
        values = answer.to_dict()
        values["notes"] = note.splitlines()
        values["why"] = [{"choice": other.name, **asdict(other)} for other in asked]
        click.echo(json.dumps(values, allow_nan=False))
        return
    click.echo(text(answer))
    if asked:
        click.echo("\nWhy not")
        for other in asked:
            click.echo(alternative_line(other))
    if note:
        click.echo(f"\n{note}")
