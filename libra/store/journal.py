"""What a trajectory has done so far, one file per quantum, outside Dask.

1. A record is named (trajectory, quantum) and created once: of two writers one wins, the other gets RecordExists.
2. A reader sees a whole record or none; files that a crash left half-written are never opened.
3. A committed record never changes. `read` returns quanta in order, without gaps, up to the first that is missing.
4. Any process that reaches the directory may append and read; there is no state in memory to lose.
"""

# Plain strings and os, no pathlib: that would cost a fifth of an append, and two happen per quantum.
# ruff: noqa: PTH108, PTH116, PTH123

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra.errors import StoreError
from libra.store.exclusive import create_exclusive
from libra.store.record import pack, unpack

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")


class Journal:
    """The records of all trajectories of a run that are not in the store yet.

    Parameters
    ----------
    root : Path
        Directory of ``<trajectory>.<quantum>.rec``; flat, because making a directory costs more than making a record. On
        storage that every worker reaches, or a lost worker's trajectories cannot be continued elsewhere.
    fsync : bool
        Flush every record to the device before `append` returns. Off, it survives its process, not a power failure.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self.root = os.fspath(root)
        self.fsync = fsync

    def append(self, trajectory_id: str, quantum: int, record: Mapping[str, Any]) -> None:
        """Create the record of one quantum (0-based).

        Values are None, bool, int, float, str, bytes, lists, dicts and numeric numpy arrays.

        Raises
        ------
        RecordExists
            This quantum is already there: another worker ran it, and the caller must stop.
        StoreError
            The record cannot be written (a full disk is named) or holds a value of another kind.
        """
        path = self._path(trajectory_id, quantum)
        create_exclusive(path, pack(record, source=path), fsync=self.fsync)

    def read(self, trajectory_id: str, start: int = 0) -> list[dict[str, Any]]:
        """Records of quanta ``start``, ``start + 1``, ... up to the first that does not exist.

        Raises StoreError, naming the file, where one is torn or corrupt.
        """
        records: list[dict[str, Any]] = []
        while (data := self._load(path := self._path(trajectory_id, start + len(records)))) is not None:
            records.append(unpack(data, source=path))
        return records

    def remove(self, trajectory_id: str) -> None:
        """Forget a trajectory; one that is not there is already forgotten."""
        quantum = 0
        try:
            while True:  # quanta have no gaps; the first goes last, so that a removal cut short is seen and done again
                os.stat(self._path(trajectory_id, quantum))
                quantum += 1
        except FileNotFoundError:
            pass
        try:
            for number in reversed(range(quantum)):
                os.unlink(self._path(trajectory_id, number))
        except FileNotFoundError:
            return  # somebody else removes it too
        except OSError as error:
            raise StoreError(f"{self.root}: cannot remove {trajectory_id}: {error.strerror}") from error

    def _path(self, trajectory_id: str, quantum: int) -> str:
        if not _ID.fullmatch(trajectory_id):
            raise StoreError(
                f"journal {self.root}: got trajectory id {trajectory_id!r}; allowed are letters, digits, '_', '.' and "
                "'-', as in train-3-0-7"
            )
        if quantum < 0:
            raise StoreError(f"journal {self.root}: got quantum {quantum} of {trajectory_id}; quanta count from 0")
        return f"{self.root}/{trajectory_id}.{quantum:04d}.rec"

    @staticmethod
    def _load(path: str) -> bytes | None:
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error
