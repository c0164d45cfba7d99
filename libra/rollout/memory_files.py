"""Directories of files in memory that do not outlive the process that made them, however it ends.

A process that is killed cannot remove its files, and those in ``/dev/shm`` take the machine's memory. So each directory is locked
by its owner; the kernel releases the lock with the process, and whoever makes the next directory of this kind on the machine
removes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


class MemoryFiles:
    """A directory ``prefix`` plus random letters under ``parent``, held until `close`.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        while True:
            self._directory = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
            self.path = Path(self._directory.name)
            held = _held(self.path)
            if held is not None:
                self._held = held
                return
            self._directory.cleanup()  # another process has just taken it for one that was left

    def close(self) -> None:
        """Remove it; a second call does nothing."""
        self._directory.cleanup()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _held(path: Path) -> int | None:
    """A descriptor with the lock of a directory; None if another process has it, or it is gone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def _remove_if_left(path: Path) -> None:
    held = _held(path)
    if held is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)
        logger.info("%s was left by a process that has died; it is removed", path)
