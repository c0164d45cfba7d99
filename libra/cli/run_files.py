"""The files of a run: ``libra doctor RUN`` reads all, ``libra repair RUN`` rebuilds damaged ones, ``libra resume`` refuses them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.driver.damage import SETTLE_S, advice, check_settled, refuse_damaged
from libra.driver.run_lock import refuse_running
from libra.driver.set_aside import go_back
from libra.errors import DamagedRun, RunDirectoryError, shell_path
from libra.observe.run_directory import iteration_rows, metric_rows, state_of
from libra.store.batch_membership import batch_path

if TYPE_CHECKING:
    from libra.config import RunConfig


def doctor_run(run_dir: Path, *, as_json: bool) -> None:
    """Print that the files of a run are whole, or raise DamagedRun; as JSON, a list of the damaged ones."""
    # Of a run at work, whose committer keeps the store, each check finds other files that were removed while it was read.
    check = check_settled(run_dir, wait_s=0.0 if _is_running(run_dir) else SETTLE_S)
    if as_json:
        click.echo(json.dumps([asdict(damage) for damage in check.damages], indent=1))
        if check.damages:
            raise click.exceptions.Exit(2)
        return
    if check.damages:
        raise DamagedRun(advice(check, run_dir))
    click.echo(
        f"{run_dir}: every file is whole; {check.num_batches} batches, {len(check.whole_checkpoints)} checkpoints"
    )


def repair_command(run_dir: Path) -> bool:
    """Repair a run and print each repair; False if a file is still damaged."""
    from libra.driver.repair import repair_run

    result = repair_run(run_dir, click.echo)
    if result.check.damages:
        return False
    if result.num_repaired:
        click.echo(f"{run_dir}: repaired; type libra resume {shell_path(run_dir)} to continue it")
    else:
        click.echo(f"{run_dir}: every file is whole, there is nothing to repair")
    return True


def ready_to_resume(run_dir: Path, step: int | None) -> None:
    """DamagedRun if a file of the run is damaged; with ``step``, return to that checkpoint instead, and print it.

    RunDirectoryError if a living driver has the run.
    """
    refuse_running(run_dir.expanduser().absolute())
    if step is None:
        refuse_damaged(run_dir)
        return
    for line in go_back(run_dir, step):
        click.echo(line)


def nothing_left(run_dir: Path, config: RunConfig) -> str | None:
    """The line for a run of which nothing is left to do, its last evaluation and checkpoint included; None if something is."""
    total, ended = config.run.iterations, len(iteration_rows(metric_rows(run_dir)))
    if not _checkpoint(run_dir, total).is_dir() or not batch_path(run_dir / "batches", total - 1).exists():
        return None
    if state_of(run_dir, config.model_dump(mode="json"), ended) != "finished":
        return None
    if ended > total and _checkpoint(run_dir, ended).is_dir():  # more of them were typed for an earlier start
        total = ended
    model = shell_path(_checkpoint(run_dir, total))
    return (
        f"{run_dir}: all its {total} iterations have ended, and nothing is left to do; its model is {model}. For more of them, "
        f"type libra resume {shell_path(run_dir)} run.iterations={2 * total}"
    )


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def _is_running(run_dir: Path) -> bool:
    try:
        refuse_running(run_dir.expanduser().absolute())
    except RunDirectoryError:
        return True
    return False
