"""Commands for clusters and running runs: ``libra cluster``, ``roles`` and ``deliver``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from libra.cli.arguments import JSON, RUN, SCHEDULER, aligned, warn_of_ignored
from libra.errors import ClusterError, ConfigError


@click.group()
def cluster() -> None:
    """Start and stop clusters."""


@cluster.command()
@click.argument("config", metavar="CONFIG")
@click.argument("action", metavar="up|status|down", type=click.Choice(["up", "status", "down"]), required=False)
@click.argument("overrides", metavar="[SECTION.KEY=VALUE]...", nargs=-1)
@click.option("--print", "only_print", is_flag=True, help="Print the job script of each worker and submit nothing.")
def slurm(config: str, action: str | None, overrides: tuple[str, ...], only_print: bool) -> None:
    """A cluster of Slurm jobs: one for each rollout, train and tool worker of CONFIG (section slurm).

    \b
    libra cluster slurm my.yaml --print                     # the job scripts
    libra cluster slurm my.yaml up                          # submit, and keep the jobs running
    libra run my.yaml --scheduler slurm/cluster.json        # any number of runs
    libra cluster slurm my.yaml status
    libra cluster slurm my.yaml down
    """
    from libra.cluster import slurm_service
    from libra.cluster.local import number_of_workers
    from libra.cluster.slurm_jobs import CONTACT_FILE, LOGS, scripts
    from libra.config import load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, "slurm", overrides)
    path = loaded.slurm.dir / CONTACT_FILE
    match "print" if only_print else action:
        case "print":
            for worker_name, script in scripts(loaded, loaded.slurm.dir.absolute()).items():
                click.secho(f"# ---- {worker_name}", bold=True)
                click.echo(script)
        case "up":
            contact = slurm_service.up(loaded)
            click.echo(f"scheduler {contact.address}, run by process {contact.pid} on {contact.host}")
            if contact.dashboard:
                port = contact.dashboard.split(":")[2].split("/")[0]
                tunnel = f"ssh -L {port}:127.0.0.1:{port} {contact.host}"
                click.echo(f"dashboard {contact.dashboard} (from another machine: {tunnel})")
            wanted, taken = sum(number_of_workers(loaded).values()), len(slurm_service.submitted(loaded))
            if taken < wanted:
                log = loaded.slurm.dir / LOGS / slurm_service.SERVICE_LOG
                click.echo(f"{taken} of {wanted} jobs submitted; {log} has why, and the others are tried again")
            click.echo(f"jobs submitted; next: libra run {config} --scheduler {path}")
        case "down":
            contact = slurm_service.down(loaded)
            click.echo(f"scheduler {contact.address} stopped, jobs cancelled")
        case "status":
            contact, workers = slurm_service.status(loaded)
            click.echo(f"scheduler {contact.address}, kept by process {contact.pid} on {contact.host}")
            for worker in workers:
                seen = "connected" if worker.connected else "not connected"
                click.echo(f"  {worker.name:<14}{worker.job_id:>10}  {worker.state:<12}{seen:<15}{worker.reason}")
            roles = Counter(worker.role for worker in workers if worker.connected)
            click.echo(
                ", ".join(f"{roles[role]} {role}" for role in ("rollout", "train", "tool")) + " workers connected"
            )
        case _:
            raise click.UsageError("type up, status or down after CONFIG, or --print")


@cluster.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace the present key; processes started with it stay cut off.")
def tls(directory: Path, force: bool) -> None:
    """Make a key for a scheduler and workers that you start yourself, and Dask settings that require it.

    Without one, anyone who reaches the scheduler's port can run code on every worker. It also encrypts all traffic. DIR has to
    be at the same path on every machine, and can be read by you only.

    \b
    libra cluster tls /shared/you/libra-tls
    export DASK_CONFIG=/shared/you/libra-tls/dask.yaml      # in every shell and job that starts one of these
    dask scheduler --port 8786 --dashboard-address 127.0.0.1:8787
    dask worker tls://HOST:8786 --nthreads 72 --resources ROLLOUT=64
    libra run CONFIG --scheduler tls://HOST:8786
    """
    from libra.cluster.connection import CERTIFICATE_FILE, KEY_FILE, make_files
    from libra.cluster.settings import settings_yaml

    directory = directory.absolute()
    if (directory / KEY_FILE).exists() and not force:
        raise click.UsageError(f"{directory / KEY_FILE} exists; type --force to replace it")
    make_files(directory)
    settings = directory / "dask.yaml"
    settings.write_text(settings_yaml(directory / CERTIFICATE_FILE, directory / KEY_FILE))
    click.echo(f"export DASK_CONFIG={settings}")


@click.command()
@RUN
@click.argument("words", metavar="[WORKER=ROLE]...", nargs=-1)
@click.option("--cancel", type=int, metavar="GENERATION", help="Undo this change, if it has not ended.")
@click.option("--wait", is_flag=True, help="Wait until the change has ended; exit with 1 if it was undone.")
@SCHEDULER
@JSON
def roles(run_dir: Path, words: tuple[str, ...], **choice: Any) -> None:
    """Show the roles of the workers of RUN, the directory of a running run, or change them.

    ROLE is rollout, rollout:tpN (an engine of N GPUs), train, or lent (its GPU belongs to another worker's engine). Workers named
    together change together: all or none.

    \b
    libra roles runs/my_run
    libra roles runs/my_run rollout-0=train --wait
    libra roles runs/my_run rollout-0=rollout:tp2 rollout-1=lent
    libra roles runs/my_run --cancel 3
    """
    if not roles_command(run_dir, words, **choice):
        raise click.exceptions.Exit(1)


_WANTED = re.compile(r"(?P<worker>[^=\s]+)=(?P<role>rollout|train|lent)(?::tp(?P<tp>[1-9]\d*))?")
COLUMNS = ("worker", "role", "tp", "stage", "for_s", "generation", "seconds", "reason")


def assignments(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Roles by worker from words such as ``rollout-0=rollout:tp2``; ConfigError otherwise."""
    wanted: dict[str, dict[str, Any]] = {}
    for word in words:
        match = _WANTED.fullmatch(word)
        if match is None or (match["tp"] and match["role"] != "rollout"):
            raise ConfigError(
                f"libra roles: got {word!r}; allowed are WORKER=rollout, WORKER=rollout:tpN, WORKER=train and WORKER=lent; type "
                "e.g. rollout-0=train"
            )
        if match["worker"] in wanted:
            raise ConfigError(f"libra roles: {match['worker']} has two roles in this command; type one of them")
        wanted[match["worker"]] = {"role": match["role"]} | ({"tp": int(match["tp"])} if match["tp"] else {})
    return wanted


def roles_command(
    run_dir: Path,
    words: Sequence[str],
    *,
    scheduler: str | None = None,
    cancel: int | None = None,
    wait: bool = False,
    as_json: bool = False,
) -> bool:
    """Show the roles, after a change if there is one; False if ``wait`` saw the change undone."""
    from libra.cluster.connection import reach
    from libra.driver.run_client import RunClient

    wanted = assignments(words)
    if wanted and cancel is not None:
        raise ConfigError(
            "libra roles: --cancel undoes a change, and WORKER=ROLE starts one; type one of them at a time"
        )
    if wait and not wanted and cancel is None:
        raise ConfigError(
            "libra roles: --wait waits for a change, and this command starts none; type e.g. rollout-0=train"
        )
    client, contact = reach(run_dir, scheduler)
    generation, done, rows = None, True, list[dict[str, Any]]()
    with client:
        if contact.hybrid_workers:
            run = RunClient(client, contact.run, contact.epoch)
            if wanted:
                generation = run.change_roles(wanted)
            elif cancel is not None:
                generation = run.cancel_roles(cancel)
            if generation is not None and wait:
                done = run.wait_for_roles(generation)
            rows = run.roles()
        elif wanted or cancel is not None:  # the scheduler has no such handler
            raise ClusterError(f"libra roles: {table(rows)[0]}")
    if as_json:
        result = {"run": contact.run, "generation": generation, "changed": done if wait else None, "roles": rows}
        click.echo(json.dumps(result))
        return done
    if generation is not None:
        state = ("has ended" if done else "was undone") if wait else "has started"
        click.echo(f"change {generation} of run {contact.run} {state}")
    click.echo("\n".join(table(rows)))
    return done


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table with one row per worker."""
    if not rows:
        return ["no worker of this run can change its role; start a run with cluster.hybrid_workers=1 or more"]
    return list(
        aligned([COLUMNS, *([_cell(row.get(name)) for name in COLUMNS] for row in rows)], num_left=len(COLUMNS))
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@click.command()
@RUN
@click.argument("trajectory")
@click.argument("value", type=float)
def deliver(run_dir: Path, trajectory: str, value: float) -> None:
    """Deliver VALUE as the reward of TRAJECTORY (train-ITERATION-GROUP-SAMPLE), whose reward function returned libra.Late.

    The first delivery counts, in the next batch of RUN, which need not be running. A negative VALUE comes after "--".

    \b
    libra deliver runs/my_run train-3-0-7 1.0
    libra deliver runs/my_run train-3-0-7 -- -0.5
    """
    from libra.driver.late_delivery import deliver as record

    click.echo(record(trajectory, value, run=run_dir))
