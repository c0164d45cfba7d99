"""Workers that have left a scheduler and have not returned, by name: the newest `KEPT` of them.

Workers without a name of their own are named by their address, so that a cluster which starts and ends workers all the time has
ever new names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

KEPT = 1024


class LostWorkers:
    """Lost workers by name: a worker that returns has the same name and another address."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._name = {address: str(ws.name) for address, ws in scheduler.workers.items()}
        self._left_s: dict[str, float] = {}

    def joined(self, name: str, address: str) -> None:
        """A worker is in the cluster."""
        self._name[address] = name
        self._left_s.pop(name, None)

    def left(self, address: str) -> None:
        """The worker at this address has left the cluster."""
        name = self._name.pop(address, address)
        if name not in self._name.values():  # else another of that name is there
            self._left_s.pop(name, None)
            self._left_s[name] = time.monotonic()
            if len(self._left_s) > KEPT:
                del self._left_s[next(iter(self._left_s))]

    def gone(self, within_s: float = float("inf")) -> list[str]:
        """Names of workers that left less than ``within_s`` ago and have not returned, sorted."""
        now_s = time.monotonic()
        return sorted(name for name, left_s in self._left_s.items() if now_s - left_s < within_s)
