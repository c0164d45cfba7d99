"""The lock of a run's driver, which `libra repair` takes too."""

from __future__ import annotations

from pathlib import Path

from libra.errors import RunDirectoryError, StoreError
from libra.store.committer_lock import CommitterLock, lock_holder


def refuse_running(directory: Path) -> None:
    """RunDirectoryError where a living driver has the run; nothing is written where no driver ever had it."""
    if (directory / "driver.lock").exists():
        lock_run(directory).release()


def lock_run(directory: Path) -> CommitterLock:
    """The lock of a run's driver, held by one living process; RunDirectoryError names the process that has it, or says why there
    can be no lock."""
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
