"""The directory of a new run: refused if it is taken or cannot be written, removed again if the start fails.

Invariants
----------
1. An existing file is never replaced or removed.
2. After a start that failed with an error, nothing of it is left, parent directories included that were made for it. A start that
   was interrupted leaves it: `libra resume` continues it.
3. Only the start that made the directory, or has its lock, removes it; never once the start has ended, whatever fails then.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from libra.driver.start_records import CONFIG_FILE, write_given
from libra.errors import RunDirectoryError, shell_path

if TYPE_CHECKING:
    from libra.worker.run_spec import RunSpec


def check_free(directory: Path) -> None:
    """RunDirectoryError if ``directory`` is a file, or has files already."""
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


def make_directory(spec: RunSpec, config: str, given: Mapping[str, bool]) -> tuple[Path, ...]:
    """Make the directory of a new run with its records and its empty store.

    Parameters
    ----------
    spec : RunSpec
    config : str
        The text of its configuration.
    given : mapping
        Whether an environment and a score node were given as objects, for `write_given`.

    Returns
    -------
    tuple of Path
        The directories that were made, the run's first.

    Raises
    ------
    RunDirectoryError
        It is taken, also by a start at the same time, or cannot be made or written.
    """
    from libra.store.trajectories import TrajectoryStore  # not before `check_free`, which is quick

    directory = spec.directory
    check_free(directory)
    missing = tuple(each for each in (directory, *directory.parents) if not _there(each))
    try:
        directory.mkdir(parents=True, exist_ok=directory not in missing)
    except FileExistsError:  # since the line before
        raise _taken(directory) from None
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        (directory / CONFIG_FILE).write_text(config)
        write_given(directory, config, environment=given["environment"], score=given["score"])
        TrajectoryStore.create(spec.store_path, {"run": spec.run, "model": spec.config.model.path}).close()
    except OSError as error:
        if directory in missing:
            _remove(directory, missing)
        raise _unusable(directory, error) from error
    return missing


def remove_unless_started(directory: Path, made: Iterable[Path], start: ExitStack) -> None:
    """Remove a new run's directory where ``start`` is closed with an error. Call it with the run's lock.

    ``start`` is of the start alone. Its callbacks are dropped once the start has succeeded, since from then on the run may have
    results.
    """

    def remove(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, Exception):
            _remove(directory, made)

    start.push(remove)


def _remove(directory: Path, made: Iterable[Path]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for parent in made:
        with contextlib.suppress(OSError):  # it has something else by now
            parent.rmdir()


def _there(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError:
        return True


def _taken(directory: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"run.dir/run.name: {directory} already has files, and a run never overwrites another. "
        f"Type run.name=ANOTHER_NAME, or remove the directory; to continue it, libra resume {shell_path(directory)}"
    )


def _unusable(directory: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"run.dir: {directory} cannot be written ({error.strerror or error}); type run.dir=ANOTHER_PLACE"
    )
