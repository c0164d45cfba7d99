"""What an ended run leaves: its parts on workers, where its driver has left without removing them, and segments of its event log
that are being compressed. Both are cleared in the background.

Invariants
----------
1. A run's part on a worker is known by the name of the run alone. So `cleared` is awaited before the same run is registered again:
   what is removed late is never the part of the next start.
2. Nothing here waits on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from libra import keys
from libra.scheduler import dask_internals
from libra.scheduler.run_log import RunLog

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

CLEAR_WAIT_S = 120.0
"""Longest time for which a start waits until the earlier one is cleared; a worker that hangs does not keep it out for ever."""


class EndedRuns:
    """What is being cleared of the ended runs of a scheduler, by the run's name."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._removals: dict[str, set[asyncio.Task[None]]] = {}
        self._compressions: set[asyncio.Task[None]] = set()

    def driver_left(self, run: str) -> None:
        """Remove the run's part from every worker, as its driver does where it ends; on workers that join later, too."""
        tasks = self._removals.setdefault(run, set())
        task = asyncio.ensure_future(self._remove_hosts(run))
        tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not tasks and self._removals.get(run) is tasks:
                del self._removals[run]

        task.add_done_callback(ended)

    def compressing(self, run: str, log: RunLog) -> None:
        """Follow the compression of a closed log."""
        if log.compresses:
            task = asyncio.ensure_future(asyncio.to_thread(log.wait_compressed))
            self._compressions.add(task)
            task.add_done_callback(self._compressions.discard)

    async def cleared(self, run: str) -> None:
        """Return when no part of the run is left on a worker, or after `CLEAR_WAIT_S`."""
        pending = set(self._removals.get(run, ()))
        if pending:
            _, pending = await asyncio.wait(pending, timeout=CLEAR_WAIT_S)
        if pending:
            logger.warning("run %s: an earlier start is not cleared from all workers after %g s", run, CLEAR_WAIT_S)

    async def close(self) -> None:
        """Return when every log is compressed; the scheduler stops."""
        if self._compressions:
            await asyncio.wait(self._compressions)

    async def _remove_hosts(self, run: str) -> None:
        errors = await dask_internals.remove_worker_plugin(self._scheduler, keys.host_name(run))
        for worker, what in errors.items():
            logger.warning("run %s: its part on worker %s could not be removed: %s", run, worker, what)
