"""The directory of a run: refused if it is taken, made with its start records, removed if the start fails.

The input of a run and its starts are kept twice, so that either copy can be checked and rebuilt from
the other. ``config.resolved.yaml`` is the configuration, ``given.json`` has its text and which Python
objects were given with it, and ``starts.jsonl`` has a line for each start: its epoch, the same facts
and the digest of the configuration, and ``iterations`` where a resumed run has others than the
configuration. Each is written by the driver before anything else of that start.

Invariants
----------
1. An existing file is never replaced or removed.
2. After a start that failed with an error, nothing of it is left, including parent directories that
   were made for it. An interrupted start leaves its directory: `libra resume` continues it.
3. Only the start that made the directory, or has its lock, removes it; never after the start has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from libra.errors import RunDirectoryError, StoreError, shell_path
from libra.observe.run_directory import iteration_rows, metric_rows, state_of
from libra.seals import sealed_text, unseal
from libra.store.line_log import LineLog
from libra.store.run_records import batch_path

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.worker.run_spec import RunSpec


CONFIG_FILE, GIVEN_FILE, STARTS_FILE = "config.resolved.yaml", "given.json", "starts.jsonl"


def config_digest(text: str | bytes) -> str:
    """Hexadecimal blake2b-64 of the text of a configuration."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


def write_given(directory: Path, config: str, *, environment: bool, score: bool) -> None:
    """Write ``given.json``: the text of the configuration, and whether an environment or a score node was given as an object."""
    values = {"environment": environment, "score": score, "config": config}
    (directory / GIVEN_FILE).write_text(sealed_text(values) + "\n")


def read_given(directory: Path) -> dict[str, Any]:
    """The content of ``given.json``; StoreError if it is gone, torn or altered."""
    path = directory / GIVEN_FILE
    try:
        given = unseal(path.read_bytes())
        return {
            "environment": bool(given["environment"]),
            "score": bool(given["score"]),
            "config": str(given["config"]),
        }
    except OSError as error:
        raise StoreError(f"{path}: {'it is gone' if not path.exists() else error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path}: torn or altered ({error})") from error


def log_start(directory: Path, epoch: int, iterations: int | None = None) -> None:
    """Add the line of a start; ``iterations`` only where they differ from the configuration."""
    facts = {**read_given(directory), "config": config_digest((directory / CONFIG_FILE).read_bytes()), "epoch": epoch}
    with LineLog(directory / STARTS_FILE, buffer_lines=1) as log:
        log.write_line(sealed_text(facts if iterations is None else {**facts, "iterations": iterations}))


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Every start on record; none if the file is gone. StoreError if a line is altered; a torn last one is left out."""
    path = directory / STARTS_FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [unseal(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: altered ({error})") from error


def newest_logged(directory: Path) -> int:
    """The highest epoch on record beside ``epochs/``, -1 if there is none. StoreError as `read_starts`."""
    return max((int(start.get("epoch", -1)) for start in read_starts(directory)), default=-1)


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

    ``config`` is the text of its configuration, ``given`` the keywords of `write_given`. Returns the directories that
    were made, the run's first. RunDirectoryError if it is taken or cannot be written.
    """
    from libra.store.trajectory_store import TrajectoryStore  # not before `check_free`, which is quick

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


def is_finished(directory: Path, config: RunConfig) -> bool:
    """Whether nothing is left to do of a run, its last evaluation and checkpoint included."""
    total = config.run.iterations
    if not (directory / "checkpoints" / f"step-{total:06d}").is_dir():
        return False
    ended = len(iteration_rows(metric_rows(directory)))
    made = batch_path(directory / "batches", total - 1).exists()
    return made and state_of(directory, config.model_dump(mode="json"), ended) == "finished"
