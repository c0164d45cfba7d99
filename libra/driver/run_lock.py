"""The lock of a run's driver, which `libra repair` takes too."""

from __future__ import annotations

from pathlib import Path

from libra.errors import RunDirectoryError, StoreError
from libra.store.committer_lock import CommitterLock


def refuse_running(directory: Path) -> None:
    """RunDirectoryError where a living driver has the run; nothing is written where no driver ever had it."""
    if (directory / "driver.lock").exists():
        lock_run(directory).release()


def lock_run(directory: Path) -> CommitterLock:
    """The lock of a run's driver, held by one living process; RunDirectoryError names the process that has it."""
    try:
        return CommitterLock(directory / "driver")
    except StoreError as error:
        raise RunDirectoryError(
            f"{directory}: another driver has this run; stop it first, or wait for it ({error})"
        ) from error
