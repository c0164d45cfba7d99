"""What a local worker does first: its errors go to a file of the run, and Ctrl-C in the terminal is the driver's alone.

A preload of local workers (`libra.cluster.local`). Standard output stays what it was, for the prints of a user's own functions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from libra.cluster.worker_environment import LOG_VARIABLE

if TYPE_CHECKING:
    from distributed import Worker


def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker's process, before it connects to the scheduler."""
    if path := os.environ.pop(LOG_VARIABLE, ""):
        _errors_to(path)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave_to_the_driver)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _errors_to(path: str) -> None:
    """Standard error to the end of a file, of this process and of those that it starts."""
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:  # a full disk: what fails on that says so itself
        return
    sys.stderr.flush()
    os.dup2(opened, 2)
    os.close(opened)


def _leave_to_the_driver(number: int, frame: FrameType | None) -> None:
    """A handler, unlike SIG_IGN, is not inherited by programs that a tool starts."""
