"""Files that are created once, whole or not at all.

1. Of any number of writers of one path exactly one succeeds; the others get RecordExists.
2. A reader sees no file or the whole file: the bytes go to a temporary file first, which is then linked to its name.
3. A crash leaves at most a temporary file (its name begins with ``.`` and ends with ``.tmp``), which no reader opens.

`os.link` is atomic on local file systems and over NFS, where O_EXCL alone would still show a half-written file.
"""

# Plain strings and os, no pathlib: that would cost a fifth of an append, and two happen per quantum.
# ruff: noqa: PTH103, PTH108, PTH116

from __future__ import annotations

import errno
import os
from pathlib import Path

from libra.errors import RecordExists, StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_failure(error: OSError, path: str | Path) -> StoreError:
    """``error`` met while writing ``path`` as a StoreError that says what to do."""
    if error.errno in _FULL:
        what = "quota exceeded" if error.errno == errno.EDQUOT else "disk full"
        return StoreError(
            f"{path}: {what}; nothing that was committed is lost. Make space on that file system "
            f"(df -h {Path(path).parent}), then type libra resume RUN"
        )
    return StoreError(f"{path}: cannot write: {error.strerror or error}")


def create_exclusive(path: str | Path, data: bytes, *, fsync: bool = False) -> None:
    """Create ``path`` with ``data``; its directory is made where missing.

    Parameters
    ----------
    fsync : bool
        Also survive a power failure: the file and its directory are flushed to the device (milliseconds). Without it
        the file survives the death of any process, not that of the machine.

    Raises
    ------
    RecordExists
        Somebody else created ``path`` first.
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


def _write(temporary: str, data: bytes, fsync: bool) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
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
        raise RecordExists(f"{path}: already written by another writer; whoever lost this race must stop") from None


def _remove(temporary: str) -> None:
    try:
        os.unlink(temporary)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it was never made, and the error at hand says why
    except OSError as error:
        raise write_failure(error, temporary) from error


def sync_directory(directory: str | Path) -> None:
    """Flush a directory, so that a name just made in it survives a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
