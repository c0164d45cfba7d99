"""Epochs: each start of a run takes the next number, and whoever holds an older one must stop.

1. An epoch is taken by one exclusive create; two starts never have the same.
2. A holder is *fenced off* as soon as the next epoch exists. It finds out at its next `Epoch.check`, which everything that
   writes for a run calls first.
3. A check is no lock: a writer may be fenced between its check and its write. What it then writes is still a record that is
   created exclusively, so it is either the one record of that name or refused; it carries its epoch.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.errors import FencedOff, RecordExists
from libra.store.exclusive_files import create_exclusive


class Epoch:
    """One start of a run, as its workers and its driver hold it.

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
        """FencedOff where a newer start of the run exists."""
        if os.path.exists(self._next):  # noqa: PTH110  twice a quantum
            raise FencedOff(
                f"{self.directory.parent}: epoch {self.number} is over, the run was started again as epoch "
                f"{newest_epoch(self.directory)}; this process stops and writes nothing more"
            )


def newest_epoch(directory: Path) -> int:
    """Number of the last start, -1 where there was none."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def take_epoch(directory: Path) -> Epoch:
    """The next epoch of a run, from 0; fences off every older one."""
    while True:
        number = newest_epoch(directory) + 1
        try:
            create_exclusive(directory / f"{number:04d}", b"", fsync=True)
        except RecordExists:
            continue  # another start was faster; ours comes after it
        return Epoch(directory, number)
