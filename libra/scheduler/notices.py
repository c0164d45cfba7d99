"""Notices for the terminal of a run's driver, kept here until the driver has read them.

A driver in the scheduler's own process has the same terminal, and reads nothing. Any other reads with `libra_notices`
(`libra.driver.run_clients`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque

KEPT = 100
"""Maximum number of notices kept: a driver reads once a second."""


def process_name() -> str:
    """Identity of this process among those of all machines."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Notices:
    """The notices of one start of a run, numbered from 0."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._next = 0

    def warn(self, logger: logging.Logger, text: str, level: int = logging.WARNING) -> None:
        """Write a line to a log of the scheduler's process, and to the driver's terminal."""
        logger.log(level, "%s", text)
        self._kept.append((self._next, text))
        self._next += 1

    def since(self, first: int) -> list[tuple[int, str]]:
        """Number and text of those from number ``first`` on."""
        return [notice for notice in self._kept if notice[0] >= first]
