"""`libra doctor`: every check of this machine and of a cluster, and what to type where one fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from libra.cli.check_result import Check
from libra.cli.doctor_cluster import cluster_checks
from libra.cli.doctor_machine import environment_check, machine_checks
from libra.cluster.settings import SETTINGS
from libra.config import RunConfig

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def diagnose(config: RunConfig, scheduler: str | None) -> list[Check]:
    """Every check of this machine and, where there is an address, of the cluster behind it."""
    from libra.cli.doctor_start import start_checks  # here: the driver takes two seconds to import

    check, environment = environment_check(config)
    checks = [*machine_checks(config, local_cluster=scheduler is None), check]
    checks += start_checks(config, environment, local_cluster=scheduler is None)
    if scheduler is not None:
        return [*checks, *cluster_checks(scheduler, config)]
    detail = f"a run starts its own local cluster with the {len(SETTINGS)} settings it needs"
    return [*checks, Check("Dask settings", "ok", detail)]


def print_checks(checks: Sequence[Check], *, as_json: bool, console: Console | None = None) -> None:
    """Print checks as a table with a closing line, or as a JSON list."""
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=1))
        return
    console = console or Console()
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLE[check.state]
        table.add_row(Text(check.state, style), Text(check.name), Text(check.detail))
        if check.advice:
            table.add_row("", "", Text.assemble("type: ", (check.advice, "bold")))
    console.print(table)
    count = {state: sum(check.state == state for check in checks) for state in _STYLE}
    worst = next(state for state in ("fail", "warn", "ok") if count[state] or state == "ok")
    warnings = f"{count['warn']} warning{'s' * (count['warn'] != 1)}"
    console.print(Text(f"{count['ok']} passed, {warnings}, {count['fail']} failed", _STYLE[worst]))
