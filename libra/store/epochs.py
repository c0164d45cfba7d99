"""Epochs: each start of a run takes the next number, and processes of an older one must stop.

1. A start takes an epoch by one exclusive create; two starts never have the same epoch.
2. A process is *fenced off* as soon as the next epoch exists. Its next `Epoch.check` raises; every writer of a run calls it
   before it writes.
3. A number is never taken twice, also where ``epochs/`` was lost: the caller says which numbers it knows of otherwise.
4. A check is not a lock: a writer may be fenced off between its check and its write. Its record is still created exclusively, so it
   is the one record of that name or refused; it has its epoch.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.errors import FencedOff, RecordExists
from libra.store.exclusive_files import create_exclusive


class Epoch:
    """One start of a run, for its workers and its driver.

    Parameters
    ----------
    directory : Path
        ``epochs/`` of the run.
    number : int
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.directory, self.number = directory, number
        self._next = os.fspath(directory / f"{number + 1:04d}")

    def check(self) -> None:
        """FencedOff if a newer start of the run exists."""
        if os.access(self._next, os.F_OK):  # once a quantum; without an exception, unlike `exists`
            raise FencedOff(
                f"{self.directory.parent}: epoch {self.number} has ended, the run was started again as epoch "
                f"{newest_epoch(self.directory)}; this process stops and writes nothing more"
            )


def newest_epoch(directory: Path) -> int:
    """Number of the last start, -1 if there was none."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def take_epoch(directory: Path, *, above: int = -1) -> Epoch:
    """The next epoch of a run, from 0 and ``above`` a number known otherwise; fences off every older one."""
    while True:
        number = max(newest_epoch(directory), above) + 1
        try:
            create_exclusive(directory / f"{number:04d}", b"", fsync=True)
        except RecordExists:
            continue  # another start was faster; ours comes after it
        return Epoch(directory, number)
