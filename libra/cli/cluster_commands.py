"""``libra cluster``: Dask schedulers and workers of one's own. What a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def cluster() -> None:
    """Start and stop clusters."""


@cluster.command()
@click.argument("config", metavar="CONFIG")
@click.argument("action", metavar="up|status|down", type=click.Choice(["up", "status", "down"]), required=False)
@click.argument("overrides", metavar="[SECTION.KEY=VALUE]...", nargs=-1)
@click.option("--print", "only_print", is_flag=True, help="Print the job script of each worker and submit nothing.")
def slurm(config: str, action: str | None, overrides: tuple[str, ...], only_print: bool) -> None:
    """A cluster of Slurm jobs: one for each rollout, train and tool worker of CONFIG (sections slurm and slurm_*).

    \b
    libra cluster slurm my.yaml --print                     # the job scripts
    libra cluster slurm my.yaml up                          # submit, and keep the jobs running
    libra run my.yaml --scheduler slurm/cluster.json        # any number of runs
    libra cluster slurm my.yaml status
    libra cluster slurm my.yaml down
    """
    from libra.cli.settings_output import warn_of_ignored
    from libra.cli.slurm import slurm_action
    from libra.config import load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, "slurm", overrides)
    slurm_action(loaded, config, "print" if only_print else action)


@cluster.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace the key that is there: what was started with it stays cut off.")
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
    from libra.cluster.certificates import CERTIFICATE_FILE, KEY_FILE, make_files
    from libra.cluster.settings import settings_yaml

    directory = directory.absolute()
    if (directory / KEY_FILE).exists() and not force:
        raise click.UsageError(f"{directory / KEY_FILE} exists; type --force to replace it")
    make_files(directory)
    settings = directory / "dask.yaml"
    settings.write_text(settings_yaml(directory / CERTIFICATE_FILE, directory / KEY_FILE))
    click.echo(f"export DASK_CONFIG={settings}")
