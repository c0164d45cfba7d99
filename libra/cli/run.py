"""``libra run``, ``resume`` and ``repair``: a line at once, the stages of the start, the run, and its closing lines."""

from __future__ import annotations

import logging
import math
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.cli.projects import CONFIG, OVERRIDES, SCHEDULER, VERBOSE, warn_of_ignored
from libra.errors import LibraError, shell_path

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.driver.run_console import RunSummary


@click.command()
@CONFIG
@OVERRIDES
@SCHEDULER
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Start with the weights and the optimizer's state of a checkpoint, e.g. runs/NAME/checkpoints/best.",
)
@VERBOSE
def run(config: str, overrides: tuple[str, ...], scheduler: str | None, checkpoint: str | None, verbose: bool) -> None:
    """Run CONFIG: a YAML file, or libra/NAME for a configuration that ships.

    \b
    libra run configs/quickstart.yaml run.seed=1 trainer.lr=3e-4
    libra run configs/math_tools.yaml configs/qwen3_4b.yaml # the second over the first
    libra run configs/qwen3_4b_gpu.yaml --scheduler tls://HOST:8786
    libra run configs/quickstart.yaml --from runs/NAME/checkpoints/best
    libra run my.yaml planner.layout=auto                   # plan training workers and engines first, then start them
    """
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


def made_run_name(config: str, now: datetime) -> str:
    """Default name of a run: the configuration file's name and the local time, e.g. quickstart_0131_142501."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(config).stem).strip("_")[:40] or "run"
    return f"{stem}_{now:%m%d_%H%M%S}"


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@OVERRIDES
@SCHEDULER
@click.option(
    "--from-checkpoint",
    "step",
    type=click.IntRange(0),
    metavar="N",
    help="Set checkpoints after step N aside and repeat the steps since; 0: from the model that the run began with.",
)
@VERBOSE
def resume(run_dir: Path, overrides: tuple[str, ...], scheduler: str | None, step: int | None, verbose: bool) -> None:
    """Continue RUN, the directory of a run that was stopped or killed, from what it committed.

    Nothing that was committed is generated again. Settings that determine the result must not change; settings of cluster,
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
    ready_to_resume(run_dir, step)  # before what takes seconds to import
    from libra.config.field_help import one_line_yaml
    from libra.config.load import load_resumed

    if scheduler is not None:
        overrides = (*overrides, f"cluster.scheduler={one_line_yaml(scheduler)}")
    loaded = load_resumed(run_dir, overrides)
    if (line := nothing_left(run_dir, loaded)) is not None:
        click.echo(line)
        return
    warn_of_ignored(loaded, "run", overrides)
    run_to_its_end(loaded, resume=True, verbose=verbose, overrides=overrides)


def ready_to_resume(run_dir: Path, step: int | None) -> None:
    """DamagedRun if a file of the run is damaged; with ``step``, return to that checkpoint instead, and print it.

    RunDirectoryError if a living driver has the run.
    """
    from libra.driver.damage import go_back, refuse_damaged
    from libra.driver.rundir import refuse_running

    refuse_running(run_dir.expanduser().absolute())
    if step is None:
        refuse_damaged(run_dir)
        return
    for line in go_back(run_dir, step):
        click.echo(line)


def nothing_left(run_dir: Path, config: RunConfig) -> str | None:
    """The line for a run of which nothing is left to do, its last evaluation and checkpoint included; None if something is."""
    from libra.driver.rundir import is_finished
    from libra.observe.run_directory import iteration_rows, metric_rows

    total = config.run.iterations
    if not is_finished(run_dir, config):
        return None
    ended = len(iteration_rows(metric_rows(run_dir)))
    if ended > total and _checkpoint(run_dir, ended).is_dir():  # more of them were typed for an earlier start
        total = ended
    model = shell_path(_checkpoint(run_dir, total))
    return (
        f"{run_dir}: all its {total} iterations have ended, and nothing is left to do; its model is {model}. For more of them, "
        f"type libra resume {shell_path(run_dir)} run.iterations={2 * total}"
    )


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
def repair(run_dir: Path) -> None:
    """Rebuild the damaged files of RUN, a run directory, from what else the run has of them; exit with 2 if one cannot be.

    Nothing is deleted: what is replaced goes to RUN/damaged. A run that has a driver is refused. libra doctor RUN names what is
    damaged, libra resume RUN continues afterwards.
    """
    from libra.driver.repair import repair_run

    result = repair_run(run_dir, click.echo)
    if result.check.damages:
        raise click.exceptions.Exit(2)
    if result.num_repaired:
        click.echo(f"{run_dir}: repaired; type libra resume {shell_path(run_dir)} to continue it")
    else:
        click.echo(f"{run_dir}: every file is whole, there is nothing to repair")


def run_to_its_end(config: RunConfig, *, resume: bool, verbose: bool, overrides: Sequence[str] = ()) -> None:
    """Run or resume a configuration, which has a name, to its end, and print the summary; LibraError is one message.

    ``overrides``: settings typed for a resumed run.
    """
    from libra.cluster import fork_server
    from libra.cluster.worker_process import inherited_environment
    from libra.driver.early_checks import check_early, first_line
    from libra.driver.run_console import Interruption, resume_words
    from libra.driver.rundir import run_directory
    from libra.observe.start_stages import StartStages

    stages = StartStages(enabled=config.observe.progress)
    directory = run_directory(config)
    with Interruption(command=True, overrides=overrides) as interruption:
        interruption.of(directory, resume_words(directory, given=False))
        stages.say(first_line(config))
        check_early(config, resume=resume, starts_workers=config.cluster.scheduler is None, given=False)
        if config.planner.layout == "configured":  # else the layout, which decides what workers do, is not known yet
            fork_server.begin(config, inherited_environment(config))
        stages.begin("libraries")
        from libra.cli.plan_command import shown_layout
        from libra.driver.run_session import run

        log_to_stderr(logging.INFO if verbose else logging.WARNING)
        try:
            config = shown_layout(config)
            summary = run(config, resume=resume, interruption=interruption, stages=stages)
        except LibraError:
            raise
        except Exception as error:  # the boundary to the terminal: any other error is a line there, too
            raise _in_one_line(error, directory, overrides) from error
        click.echo("\n".join(closing_lines(summary, config)))


def log_to_stderr(level: int) -> None:
    """Send records of ``level`` and above to standard error, unless the process has handlers already.

    Tracebacks only with ``LIBRA_TRACEBACK=1``; a run's are in its ``logs/driver.log``.
    """
    from libra.driver.run_console import ShownFormatter

    handler = logging.StreamHandler()
    brief = os.environ.get("LIBRA_TRACEBACK") != "1"
    handler.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s", brief=brief))
    logging.basicConfig(level=level, handlers=[handler])


def _in_one_line(error: Exception, directory: Path, overrides: Sequence[str]) -> Exception:
    from libra.driver.run_console import resume_words, with_overrides

    log = directory / "logs" / "driver.log"
    if os.environ.get("LIBRA_TRACEBACK") == "1":
        return error
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0]}"
    if not log.exists():
        return LibraError(f"{text}; type LIBRA_TRACEBACK=1 before the command for its traceback")
    with log.open("a") as file:
        file.write(
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run ended with\n{''.join(traceback.format_exception(error))}"
        )
    again = with_overrides(resume_words(directory, given=False), overrides)
    return LibraError(f"{text}; its traceback is in {log}. To try again from what is committed, type {again}")


def closing_lines(summary: RunSummary, config: RunConfig) -> list[str]:
    """The closing lines of a run; rewards are means over graded prompts."""
    from libra.observe.html import duration

    directory = shell_path(_short(summary.directory))
    count = len(summary.iterations)
    lines = [f"done          {count} iteration{'s' * (count != 1)} in {duration(summary.wall_s, 1)}"]
    if len(summary.evaluations) >= 2:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        gain = summary.reward_after - summary.reward_before
        lines.append(
            f"held out      mean reward {summary.reward_before:.3f} before, {summary.reward_after:.3f} after ({gain:+.3f}), "
            f"{last['num']} questions each"
        )
        bins = [name for name in last.get("bins", {}) if name in first.get("bins", {})]
        if bins:
            pairs = ", ".join(f"{name}: {first['bins'][name][0]:.2f} -> {last['bins'][name][0]:.2f}" for name in bins)
            lines.append(f"by bin        {pairs}")
        left_out = int(first.get("left_out", 0)) + int(last.get("left_out", 0))
        if left_out:
            lines.append(
                f"not graded    {left_out} questions, because of failures outside the model; see libra inspect --failed"
            )
    elif summary.iterations:
        rewards = [float(values.get("reward", math.nan)) for values in summary.iterations]
        lines.append(
            f"reward        {rewards[0]:.3f} in the first iteration, {rewards[-1]:.3f} in the last, on training questions"
        )
    lines += _failures(summary)
    lines += _no_signal(summary)
    lines.append(f"run           {directory}")
    if summary.checkpoint is not None:
        lines.append(f"model         {shell_path(_short(summary.checkpoint))}")
    if summary.best is not None and summary.best != summary.checkpoint:
        lines.append(f"best model    {shell_path(_short(summary.best))}")
    lines.append(f"look at it    libra report {directory}")
    lines += [f"              libra {command} {directory}" for command in ("page", "inspect")]
    if "tensorboard" in config.observe.trackers:
        lines.append(f"              tensorboard --logdir {directory}")
    return lines


def _failures(summary: RunSummary) -> list[str]:
    from libra.observe.progress import failure_causes

    total: Counter[str] = Counter()
    for values in summary.iterations:
        total.update(
            {
                name: int(count)
                for name, count in values.items()
                if name.startswith(("failures", "resampled", "trajectories", "left_out"))
            }
        )
    causes = failure_causes(total)
    if not causes:
        return []
    return [
        f"failures      {causes}: {total['resampled']:,} tried again, {total['left_out']:,} of "
        f"{total['trajectories']:,} trajectories left out; see docs/failures.md"
    ]


def _no_signal(summary: RunSummary) -> list[str]:
    causes = [str(values["no_signal"]) for values in summary.iterations if values.get("no_signal")]
    if not causes:
        return []
    last = f"; the last: {causes[-1]}" if len(causes) > 1 else f": {causes[0]}"
    return [f"no signal     in {len(causes)} of {len(summary.iterations)} iterations there was nothing to learn{last}"]


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
