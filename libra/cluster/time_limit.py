"""A worker plugin that drains the worker before its batch job's time limit; ``dask worker --preload
libra.cluster.time_limit``.

``DRAIN_S`` seconds before the limit it takes no new tasks. Running ones may finish (a trajectory continues on another worker
after its quantum), and it leaves after the last one, or ``LEAVE_S`` before the limit. Without a limit nothing happens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping

from distributed import Worker
from distributed.core import Status

logger = logging.getLogger(__name__)

DRAIN_S = 120.0
LEAVE_S = 10.0
"""Seconds before the time limit at which it leaves, even with running tasks."""
_DRAINS: set[asyncio.Task[None]] = set()


def end_of_job_s(environment: Mapping[str, str]) -> float | None:
    """Time of the limit in seconds since the epoch, from ``LIBRA_JOB_END_S`` of the job's script; None without one."""
    end = environment.get("LIBRA_JOB_END_S", "")
    return float(end) if end.isdecimal() and int(end) > 0 else None


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts."""
    end_s = end_of_job_s(os.environ)
    if end_s is None:
        return
    task = asyncio.ensure_future(leave_in_time(worker, end_s, DRAIN_S))
    _DRAINS.add(task)
    task.add_done_callback(_DRAINS.discard)


async def leave_in_time(worker: Worker, end_s: float, drain_s: float) -> None:
    """Wait, stop taking tasks, let those that run end, leave."""
    await asyncio.sleep(max(0.0, end_s - drain_s - time.time()))
    logger.warning(
        "time limit in %.0f s: worker %s takes no new tasks and leaves when %d are done",
        end_s - time.time(), worker.name, worker.state.executing_count,
    )  # fmt: skip
    worker.status = Status.paused  # the scheduler is notified, and sends no more
    while worker.state.executing_count and time.time() < end_s - LEAVE_S:  # noqa: ASYNC110 (the worker's state has no event)
        await asyncio.sleep(0.2)
    await worker.close_gracefully(restart=False)
