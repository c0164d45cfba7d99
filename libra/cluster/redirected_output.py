"""A file descriptor of this process that writes elsewhere for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STDERR = 2


@contextmanager
def redirected(number: int, path: Path) -> Iterator[None]:
    """Within it, file descriptor ``number`` writes to the end of ``path``, also for processes that are started; OSError."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    kept = os.dup(number)
    os.dup2(opened, number)
    os.close(opened)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
