"""Files that are created once, whole or not at all, and the lock of a store.

1. If several writers create one path, exactly one succeeds; the others get RecordExists.
2. A reader sees no file or the whole file: the bytes go to a temporary file, which is then linked
   to its final name.
3. A crash leaves at most a temporary file (``.NAME.tmp``), which no reader opens.
4. At most one process holds a lock. The kernel releases the lock when the process dies, and the
   lock file names the process.

`os.link` is atomic on local file systems and over NFS. With O_EXCL alone, readers would see
half-written files.
"""

# Plain strings and os, no pathlib: that would cost a fifth of an append, and two happen per quantum.
# ruff: noqa: PTH103, PTH108, PTH116

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from libra.errors import RecordExists, StoreError, disk_refusal
from libra.seals import parsed_json


def write_failure(error: OSError, path: str | Path) -> StoreError:
    """``error``, raised while writing ``path``, as a StoreError with the remedy."""
    return StoreError(disk_refusal(path, error))


def already_written(path: str | Path) -> RecordExists:
    """The error for the second writer of ``path``."""
    return RecordExists(f"{path}: already written by another writer; this one must stop")


def create_exclusive(path: str | Path, data: bytes, *, fsync: bool = False) -> None:
    """Create ``path`` with ``data``, and its directory if missing.

    With ``fsync``, the file survives a power failure (at a cost of milliseconds); without, it
    survives the death of any process.

    Raises
    ------
    RecordExists
        Another writer created ``path`` first.
    StoreError
        The file cannot be written; the message names a full disk.
    """
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}.{os.urandom(12).hex()}.tmp"
    try:
        try:
            _write(temporary, data, fsync)
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            _write(temporary, data, fsync)
        _link(temporary, path)
        if fsync:
            sync_directory(directory)
    except RecordExists:
        raise
    except OSError as error:
        raise write_failure(error, path) from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_all(descriptor: int, data: bytes, offset: int | None = None) -> None:
    """Write all of ``data`` at ``offset``, or at the file's position if None."""
    view = memoryview(data)
    while view:
        count = os.write(descriptor, view) if offset is None else os.pwrite(descriptor, view, offset)
        view, offset = view[count:], None if offset is None else offset + count


def _write(temporary: str, data: bytes, fsync: bool) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(temporary: str, path: str | Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        if os.stat(temporary).st_nlink == 2:  # NFS: the link was made, only the first answer to us was lost
            return
        raise already_written(path) from None


def replace_file(path: str | Path, data: bytes) -> None:
    """Replace a file by an atomic rename, without fsync. After an OSError the old content stays."""
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        with open(temporary, "wb") as file:  # noqa: PTH123
            file.write(data)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync_directory(directory: str | Path) -> None:
    """Flush a directory to the device, so that new names in it survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOOKS_S = (0.01, 0.1, None)
"""Waits between attempts to take the lock: `lock_holder` holds it for a moment, too."""


class CommitterLock:
    """An advisory lock on ``<store>.lock``, held from creation to `release`. Raises StoreError if
    another process holds the lock (the message names it), or the file system has no locks."""

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(f"{store.name}.lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_failure(error, self.path) from error
        try:
            _take(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 4096, 0).decode(errors="replace") or "a process without a name"
            self.release()
            raise StoreError(
                f"{store}: another committer has it open ({holder}); a store has one committer. Wait for it, stop it, "
                "or open the store with mode='r'"
            ) from error
        except OSError as error:
            self.release()
            raise StoreError(
                f"{self.path}: cannot lock it ({error.strerror}); put the run directory on a file system with flock "
                "(a local disk, NFS 4, Lustre mounted with -o flock)"
            ) from error

    def release(self) -> None:
        """Release the lock and keep its file; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _take(descriptor: int) -> None:
    for wait_s in LOOKS_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if wait_s is None:
                raise
            time.sleep(wait_s)


class Holder(NamedTuple):
    """The process that holds a lock; ``pid`` 0 and ``host`` "" if the file does not name it."""

    pid: int
    host: str


def lock_holder(store: Path) -> Holder | None:
    """The process that holds a store's lock; None if unlocked or unknown. Takes no lock."""
    try:
        descriptor = os.open(store.with_name(f"{store.name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the descriptor is closed below
    except BlockingIOError:
        try:
            return Holder(**parsed_json(os.pread(descriptor, 4096, 0)))
        except (ValueError, TypeError):
            return Holder(0, "")
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None
