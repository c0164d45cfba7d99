"""`libra doctor`: checks of machine, cluster or run, with a command for each failure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.cli.arguments import JSON, OVERRIDES, SCHEDULER
from libra.errors import DamagedRun, LibraError

if TYPE_CHECKING:
    from rich.console import Console

    from libra.cli.doctor_checks import Check
    from libra.config import RunConfig
    from libra.envs import Environment


@click.command()
@click.argument("config", metavar="[CONFIG|RUN]", required=False)
@OVERRIDES
@SCHEDULER
@JSON
@click.option("--settings", is_flag=True, help="Print a Dask configuration for your own scheduler and workers.")
def doctor(
    config: str | None, overrides: tuple[str, ...], scheduler: str | None, as_json: bool, settings: bool
) -> None:
    """Check that this machine, and a Dask cluster, meet the needs of a run; exit with 1 if a check fails.

    For CONFIG it prints a line for each thing that libra run would refuse before any worker starts: files of the model, parts of
    your own, an agent's variables, tools, services, a teacher, layout, prompts and evaluation. Without CONFIG it checks for the
    default settings. Given the directory of a run instead, it reads every file of that run, and exits with 2 and the command to
    type if one is damaged.
    """
    if config is not None and Path(config).is_dir():
        doctor_run(Path(config), as_json=as_json)
        return
    if settings:
        from libra.cluster.settings import settings_yaml

        click.echo(settings_yaml(), nl=False)
        return
    from libra.config import config_from_dict, load_config

    loaded = load_config(config, overrides) if config is not None else config_from_dict({})
    checks = diagnose(loaded, scheduler or loaded.cluster.scheduler)
    print_checks(checks, as_json=as_json)
    if any(check.state == "fail" for check in checks):
        raise click.exceptions.Exit(1)


_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def diagnose(config: RunConfig, scheduler: str | None) -> list[Check]:
    """All checks of this machine and, given a scheduler address, of its cluster."""
    from libra.cli.doctor_checks import Check, cluster_checks, environment_check, machine_checks
    from libra.cluster.settings import SETTINGS

    check, environment = environment_check(config)
    checks = [*machine_checks(config, local_cluster=scheduler is None), check]
    checks += start_checks(config, environment, local_cluster=scheduler is None)
    if scheduler is not None:
        return [*checks, *cluster_checks(scheduler, config)]
    detail = f"a run starts its own local cluster with the {len(SETTINGS)} settings it needs"
    return [*checks, Check("Dask settings", "ok", detail)]


def start_checks(config: RunConfig, environment: Environment | None, *, local_cluster: bool) -> Iterator[Check]:
    """Checks of `libra run` before workers start (`libra.driver.preflight`), in order.

    Hub models are not fetched: checks that need their files, or a missing ``environment``, are left
    out. ``local_cluster``: the run would start its own workers.
    """
    from libra.cli.doctor_checks import Check
    from libra.driver.preflight import CHECKS, Preflight  # takes two seconds to import

    directory = None if config.run.name is None else config.run.dir / config.run.name
    known = Preflight(config, local_cluster, directory, environment=environment)
    for name, check in CHECKS.items():
        if name == "engine" and config.rollout.engine == "vllm":  # covered by the check of this machine's engines
            continue
        try:
            found = check(known)
        except LibraError as error:
            detail, _, advice = " ".join(str(error).split()).rpartition("; ")
            yield Check(name, "fail", detail or advice, advice.removeprefix("type ") if detail else "")
            if name == "own parts":
                known.environment = None
        else:
            if found:
                yield Check(name, "ok", found)


def print_checks(checks: Sequence[Check], *, as_json: bool, console: Console | None = None) -> None:
    """Print checks as a table with a closing line, or as a JSON list."""
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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


def doctor_run(run_dir: Path, *, as_json: bool) -> None:
    """Print that a run's files are intact, or raise DamagedRun; as JSON, list the damaged files."""
    from libra.driver.damage import SETTLE_S, advice, check_settled
    from libra.observe.run_directory import has_driver

    # In an active run, each check finds other files that the store's committer removed meanwhile.
    check = check_settled(run_dir, wait_s=0.0 if has_driver(run_dir.expanduser().absolute()) else SETTLE_S)
    if as_json:
        click.echo(json.dumps([asdict(damage) for damage in check.damages], indent=1))
        if check.damages:
            raise click.exceptions.Exit(2)
        return
    if check.damages:
        raise DamagedRun(advice(check, run_dir))
    num = f"{check.num_batches} batches, {len(check.whole_checkpoints)} checkpoints"
    click.echo(f"{run_dir}: every file is whole; {num}")
