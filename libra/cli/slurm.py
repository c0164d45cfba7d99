"""``libra cluster slurm``: its actions and what they print."""

from __future__ import annotations

from collections import Counter

import click

from libra.config import RunConfig


def slurm_action(config: RunConfig, name: str, action: str | None) -> None:
    """Carry out ``up``, ``status``, ``down`` or ``print``; ``name`` is the configuration as it was typed."""
    from libra.cluster.slurm import start_stop
    from libra.cluster.slurm.jobs import CONTACT_FILE, LOGS, number_of_jobs, scripts

    path = config.slurm.dir / CONTACT_FILE
    match action:
        case "print":
            for worker_name, script in scripts(config, config.slurm.dir.absolute()).items():
                click.secho(f"# ---- {worker_name}", bold=True)
                click.echo(script)
        case "up":
            contact = start_stop.up(config)
            click.echo(f"scheduler {contact.address}, run by process {contact.pid} on {contact.host}")
            if contact.dashboard:
                port = contact.dashboard.split(":")[2].split("/")[0]
                click.echo(
                    f"dashboard {contact.dashboard} (from another machine: ssh -L {port}:127.0.0.1:{port} {contact.host})"
                )
            wanted, taken = sum(number_of_jobs(config).values()), len(start_stop.submitted(config))
            if taken < wanted:
                log = config.slurm.dir / LOGS / start_stop.SERVICE_LOG
                click.echo(f"{taken} of {wanted} jobs submitted; {log} has why, and the others are tried again")
            click.echo(f"jobs submitted; next: libra run {name} --scheduler {path}")
        case "down":
            contact = start_stop.down(config)
            click.echo(f"scheduler {contact.address} stopped, jobs cancelled")
        case "status":
            contact, workers = start_stop.status(config)
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
