"""Files that are created once, whole or not at all.

1. Of any number of writers of one path exactly one succeeds; the others get RecordExists.
2. A reader sees no file or the whole file: the bytes go to a temporary file first, which is then
   linked to its name.
3. A crash leaves at most a temporary file (its name begins with ``.`` and ends with ``.tmp``),
   which no reader opens.

`os.link` is atomic on local file systems and over NFS, where O_EXCL alone would still show a
half-written file.
"""

# Plain strings and os, no pathlib: that would cost a fifth of an append, and two happen per quantum.
# ruff: noqa: PTH103, PTH108, PTH116

from __future__ import annotations

import os
from pathlib import Path

from libra.errors import RecordExists, StoreError, disk_refusal


def write_failure(error: OSError, path: str | Path) -> StoreError:
    """``error`` met while writing ``path`` as a StoreError with the remedy."""
    return StoreError(disk_refusal(path, error))


def already_written(path: str | Path) -> RecordExists:
    """The error of a writer that came second."""
    return RecordExists(f"{path}: already written by another writer; this one must stop")


def create_exclusive(path: str | Path, data: bytes, *, fsync: bool = False) -> None:
    """Create ``path`` with ``data``; its directory is made where missing.

    Parameters
    ----------
    fsync : bool
        Flush the file and its directory to the device (milliseconds), to survive a power failure.
        Without it the file survives the death of any process.

    Raises
    ------
    RecordExists
        Another writer created ``path`` first.
    StoreError
        The file cannot be written; a full disk is named as such.
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
        _remove(temporary)


def write_all(descriptor: int, data: bytes, offset: int | None = None) -> None:
    """Write all of ``data`` at ``offset``, or where the file stands (None); the kernel may take it in
    parts."""
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


def _remove(temporary: str) -> None:
    try:
        os.unlink(temporary)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it was never made; the first error names the cause
    except OSError as error:
        raise write_failure(error, temporary) from error


def sync_directory(directory: str | Path) -> None:
    """Flush a directory, so that a name just made in it survives a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
