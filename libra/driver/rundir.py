"""The directory of a run: its name, lock, creation, and removal after a failed start.

Invariants
----------
1. An existing file is never replaced or removed.
2. A start that fails with an error leaves nothing, not even parent directories that it made. An
   interrupted start leaves its directory: `libra resume` continues the run.
3. Only the start that made or locked the directory removes it, and never after the start has ended.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from libra import keys
from libra.errors import RunDirectoryError, StoreError, shell_path
from libra.observe.run_directory import iteration_rows, metric_rows, state_of
from libra.store.exclusive_files import CommitterLock, lock_holder
from libra.store.run_records import batch_path
from libra.store.start_records import CONFIG_FILE, write_given

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.worker.run_spec import RunSpec


def named(config: RunConfig) -> RunConfig:
    """``config`` with a run name; by default from the time of day."""
    name = keys.check_run_name(config.run.name or time.strftime("run_%Y%m%d_%H%M%S"))
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def run_directory(config: RunConfig) -> Path:
    return (Path(config.run.dir) / (config.run.name or "")).absolute()


def refuse_running(directory: Path) -> None:
    """Raise RunDirectoryError if a living driver has the run; never creates a lock file."""
    if (directory / "driver.lock").exists():
        lock_run(directory).release()


def lock_run(directory: Path) -> CommitterLock:
    """Lock a run for this driver. Raises RunDirectoryError that names the process with the lock."""
    try:
        return CommitterLock(directory / "driver")
    except StoreError as error:
        holder = lock_holder(directory / "driver")
        if holder is None:
            raise RunDirectoryError(str(error)) from error
        who = f"process {holder.pid} on {holder.host}" if holder.pid else "a process that has not written its name"
        raise RunDirectoryError(
            f"{directory}: another driver has this run, {who}; stop it first, or wait for it"
        ) from error


def check_free(directory: Path) -> None:
    try:
        for each in (directory, directory.parent):
            if (each.is_symlink() or each.exists()) and not each.is_dir():
                typed = "run.name=ANOTHER_NAME" if each == directory else "run.dir=ANOTHER_PLACE"
                raise RunDirectoryError(f"run.dir/run.name: {each} is not a directory; type {typed}")
        taken = directory.is_dir() and any(directory.iterdir())
    except RunDirectoryError:  # which is an OSError
        raise
    except OSError as error:
        raise _unusable(directory, error) from error
    if taken:
        raise _taken(directory)


def make_directory(spec: RunSpec, config: str, *, environment: bool, score: bool) -> tuple[Path, ...]:
    """Make a new run's directory, records and empty store; returns created directories, run first.

    For ``environment`` and ``score`` see `write_given`. Raises RunDirectoryError if taken or
    unwritable.
    """
    from libra.store.trajectory_store import TrajectoryStore  # not before `check_free`, which is quick

    directory = spec.directory
    check_free(directory)
    missing = tuple(each for each in (directory, *directory.parents) if not (each.exists() or each.is_symlink()))
    try:
        directory.mkdir(parents=True, exist_ok=directory not in missing)
        (directory / CONFIG_FILE).write_text(config)
        write_given(directory, config, environment=environment, score=score)
        TrajectoryStore.create(spec.store_path, {"run": spec.run, "model": spec.config.model.path}).close()
    except FileExistsError:  # since `check_free`
        raise _taken(directory) from None
    except OSError as error:
        if missing:
            _remove(directory, missing)
        raise _unusable(directory, error) from error
    return missing


def remove_unless_started(directory: Path, made: tuple[Path, ...], start: ExitStack) -> None:
    """Remove a new run's directory if ``start`` closes with an error; requires the run's lock."""

    def remove(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, Exception):
            _remove(directory, made)

    start.push(remove)


def _remove(directory: Path, made: tuple[Path, ...]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for parent in made:
        with contextlib.suppress(OSError):  # the directory has other files by now
            parent.rmdir()


def _taken(directory: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"run.dir/run.name: {directory} already has files, and a run never overwrites another. "
        f"Type run.name=ANOTHER_NAME, or remove the directory; to continue it, libra resume {shell_path(directory)}"
    )


def _unusable(directory: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"run.dir: {directory} cannot be written ({error.strerror or error}); type run.dir=ANOTHER_PLACE"
    )


def is_finished(directory: Path, config: RunConfig) -> bool:
    """Whether a run has nothing left to do, including its last evaluation and checkpoint."""
    total = config.run.iterations
    if not (directory / "checkpoints" / f"step-{total:06d}").is_dir():
        return False
    ended = len(iteration_rows(metric_rows(directory)))
    made = batch_path(directory / "batches", total - 1).exists()
    return made and state_of(directory, config.model_dump(mode="json"), ended) == "finished"
