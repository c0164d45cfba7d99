"""``libra run``, ``resume`` and ``repair``: start messages, the run, and its closing lines."""

from __future__ import annotations

import logging
import math
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.cli.arguments import CONFIG, OVERRIDES, RUN, SCHEDULER, VERBOSE, warn_of_ignored
from libra.errors import LibraError, shell_path

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.driver.run_console import RunSummary


_COUNTED = ("failures", "resampled", "trajectories", "left_out")
"""Prefixes of the metrics that are summed in the closing lines."""


@click.command()
@CONFIG
@OVERRIDES
@SCHEDULER
@click.option(
    "--from", "checkpoint", metavar="CHECKPOINT",
    help="Start with the weights and the optimizer's state of a checkpoint, e.g. runs/NAME/checkpoints/best.",
)  # fmt: skip
@VERBOSE
def run(config: str, overrides: tuple[str, ...], scheduler: str | None, checkpoint: str | None, verbose: bool) -> None:
    """Run CONFIG: a YAML file, or libra/NAME for a configuration that ships.

    \b
    libra run configs/quickstart.yaml run.seed=1 trainer.lr=3e-4
    libra run my.yaml configs/qwen3_4b.yaml # the second over the first
    libra run configs/qwen3_4b_gpu.yaml --scheduler tls://HOST:8786
    libra run configs/quickstart.yaml --from runs/NAME/checkpoints/best
    libra run my.yaml planner.layout=auto                   # plan training workers and engines first, then start them
    """
    from libra.config import load_config
    from libra.config.field_help import one_line_yaml

    for setting, value in (("cluster.scheduler", scheduler), ("run.from_checkpoint", checkpoint)):
        if value is not None:
            overrides = (*overrides, f"{setting}={one_line_yaml(value)}")
    loaded = load_config(config, overrides)
    if loaded.run.name is None:
        loaded = load_config(config, (*overrides, f"run.name={made_run_name(config, datetime.now())}"))
    warn_of_ignored(loaded, "run", overrides)
    run_to_its_end(loaded, resume=False, verbose=verbose)


def made_run_name(config: str, now: datetime) -> str:
    """Default run name: the configuration's file name and local time, e.g. quickstart_0131_142501."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(config).stem).strip("_")[:40] or "run"
    return f"{stem}_{now:%m%d_%H%M%S}"


@click.command()
@RUN
@OVERRIDES
@SCHEDULER
@click.option(
    "--from-checkpoint", "step", type=click.IntRange(0), metavar="N",
    help="Quarantine checkpoints after step N and repeat the steps since; 0: from the model that the run started with.",
)  # fmt: skip
@VERBOSE
def resume(run_dir: Path, overrides: tuple[str, ...], scheduler: str | None, step: int | None, verbose: bool) -> None:
    """Continue RUN, the directory of a run that was stopped or killed, from its committed results.

    Nothing that was committed is generated again. Settings that determine the result must not change; settings of cluster,
    planning, display and retention, and run.iterations may. A run with damaged files is refused, with a command to type. For a
    finished run one line is printed, and nothing starts.

    \b
    libra resume runs/quickstart_0131_142501
    libra resume runs/my_run --from-checkpoint 20
    libra resume runs/my_run planner.replan=advise
    libra resume runs/my_run run.iterations=100 --scheduler tls://HOST:8786
    """
    if (run_dir / "config.resolved.yaml").is_file():
        click.echo(f"{run_dir}: its files are checked, then it goes on from its committed results")
    ready_to_resume(run_dir, step)  # before slow imports
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
    """DamagedRun for damaged files; with ``step``, return to that checkpoint and print it.

    RunDirectoryError if the run has a live driver.
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
    """Text for a finished run, with its last evaluation and checkpoint; None for any other run."""
    from libra.driver.rundir import is_finished
    from libra.observe.run_directory import iteration_rows, metric_rows

    total = config.run.iterations
    if not is_finished(run_dir, config):
        return None
    ended = len(iteration_rows(metric_rows(run_dir)))
    if ended > total and _checkpoint(run_dir, ended).is_dir():  # an earlier start had more iterations
        total = ended
    model = shell_path(_checkpoint(run_dir, total))
    return (
        f"{run_dir}: all its {total} iterations have ended, and nothing is left to do; its model is {model}. For more of them, "
        f"type libra resume {shell_path(run_dir)} run.iterations={2 * total}"
    )


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


@click.command()
@RUN
def repair(run_dir: Path) -> None:
    """Rebuild the damaged files of RUN, a run directory, from its other records; exit with 2 if one cannot be rebuilt.

    Nothing is deleted: replaced files go to RUN/damaged. A run that has a driver is refused. libra doctor RUN names the damaged
    files, libra resume RUN continues afterwards.
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
    """Run or resume a named configuration to its end; a LibraError becomes one message.

    ``overrides`` are settings typed for a resumed run.
    """
    from libra.cluster.worker_process import begin_forking
    from libra.driver.early_checks import check_early, first_line
    from libra.driver.run_console import Interruption, resume_words
    from libra.driver.rundir import run_directory
    from libra.observe.progress import StartStages

    stages = StartStages(enabled=config.observe.progress)
    directory = run_directory(config)
    with Interruption(command=True, overrides=overrides) as interruption:
        interruption.of(directory, resume_words(directory, given=False))
        stages.say(first_line(config))
        check_early(config, resume=resume, starts_workers=config.cluster.scheduler is None, given=False)
        if config.planner.layout == "configured":  # otherwise worker roles are not known yet
            begin_forking(config)
        stages.begin("libraries")
        from libra.cli.plan_command import shown_layout
        from libra.driver.run_session import run

        log_to_stderr(logging.INFO if verbose else logging.WARNING)
        try:
            config = shown_layout(config)
            summary = run(config, resume=resume, interruption=interruption, stages=stages)
        except LibraError:
            raise
        except Exception as error:  # boundary to the terminal: any other error becomes one line as well
            raise _in_one_line(error, directory, overrides) from error
        click.echo("\n".join(closing_lines(summary, config)))


def log_to_stderr(level: int) -> None:
    """Log records from ``level`` up to standard error, unless the process already has handlers.

    Tracebacks need ``LIBRA_TRACEBACK=1``; a run's are in its ``logs/driver.log``.
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
    return LibraError(f"{text}; its traceback is in {log}. To try again from the committed results, type {again}")


def closing_lines(summary: RunSummary, config: RunConfig) -> Iterator[str]:
    """The closing lines of a run; rewards are means over graded prompts."""
    from libra.observe.html import duration
    from libra.observe.progress import failure_causes

    directory, rows = shell_path(_short(summary.directory)), summary.iterations
    yield f"done          {len(rows)} iteration{'s' * (len(rows) != 1)} in {duration(summary.wall_s, 1)}"
    if len(summary.evaluations) >= 2:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        gain = summary.reward_after - summary.reward_before
        change = f"{summary.reward_before:.3f} before, {summary.reward_after:.3f} after ({gain:+.3f})"
        yield f"held out      mean reward {change}, {last['num']} questions each"
        means = {name: (first["bins"][name][0], mean) for name, (mean, *_) in last.get("bins", {}).items()
                 if name in first.get("bins", {})}  # fmt: skip
        if means:
            yield f"by bin        {', '.join(f'{name}: {a:.2f} -> {b:.2f}' for name, (a, b) in means.items())}"
        if left_out := int(first.get("left_out", 0)) + int(last.get("left_out", 0)):
            failed = "because of failures outside the model; see libra inspect --failed"
            yield f"not graded    {left_out} questions, {failed}"
    elif rows:
        start, end = (float(values.get("reward", math.nan)) for values in (rows[0], rows[-1]))
        yield f"reward        {start:.3f} in the first iteration, {end:.3f} in the last, on training questions"
    total: Counter[str] = Counter()
    for values in rows:
        total.update({name: int(count) for name, count in values.items() if name.startswith(_COUNTED)})
    if causes := failure_causes(total):
        missing = f"{total['left_out']:,} of {total['trajectories']:,} trajectories left out"
        yield f"failures      {causes}: {total['resampled']:,} tried again, {missing}; see docs/failures.md"
    if without := [str(values["no_signal"]) for values in rows if values.get("no_signal")]:
        cause = f"; the last: {without[-1]}" if len(without) > 1 else f": {without[0]}"
        yield f"no signal     in {len(without)} of {len(rows)} iterations there was nothing to learn{cause}"
    yield f"run           {directory}"
    if summary.checkpoint is not None:
        yield f"model         {shell_path(_short(summary.checkpoint))}"
    if summary.best is not None and summary.best != summary.checkpoint:
        yield f"best model    {shell_path(_short(summary.best))}"
    yield f"look at it    libra report {directory}"
    yield from (f"              libra {command} {directory}" for command in ("page", "inspect"))
    if "tensorboard" in config.observe.trackers:
        yield f"              tensorboard --logdir {directory}"


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
