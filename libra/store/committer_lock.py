"""The lock of a store's one committer.

1. At most one holder per store, among all processes that reach its file system. The kernel releases
   the lock when its holder dies, so there are no stale locks.
2. The file names the holder, for the error message.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from libra.errors import StoreError
from libra.seals import parsed_json
from libra.store.exclusive_files import write_failure

LOOKS_S = (0.01, 0.1)
"""Waits before further attempts: `lock_holder` takes the lock for a moment, too."""


class CommitterLock:
    """An advisory lock on ``<store>.lock``, held from creation to `release`.

    Raises StoreError if another process holds it (the message names the process), or the file system
    has no locks.
    """

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
            holder = (
                os.pread(self._descriptor, 4096, 0).decode(errors="replace")
                or "a process that has not written its name"
            )
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
        """Release the lock; a second call does nothing. The file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _take(descriptor: int) -> None:
    for wait_s in LOOKS_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait_s)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Holder(NamedTuple):
    """The process that holds a lock; ``pid`` 0 and an empty ``host`` if the file does not name it."""

    pid: int
    host: str


def lock_holder(store: Path) -> Holder | None:
    """The process that holds a store's lock; None if none does, or that cannot be found out. The lock is
    not taken."""
    try:
        descriptor = os.open(store.with_name(f"{store.name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until it is closed below
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
