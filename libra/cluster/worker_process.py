"""A worker's process: its environment, and a preload that acts before it connects to the scheduler.

A local worker writes errors to a file of the run and leaves Ctrl-C to the driver; standard output
stays the terminal, for the prints of a user's own functions. The worker of a batch job takes no new
tasks in the last ``DRAIN_S`` seconds before its time limit, and leaves after its last running task,
or ``LEAVE_S`` before the limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING

from libra.config import RunConfig
from libra.processes.child_environment import loopback_direct

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

DRAIN_S = 120.0
LEAVE_S = 10.0
"""Seconds before the time limit at which it leaves, even with running tasks."""
_DRAINS: set[asyncio.Task[None]] = set()


WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DASK_LOGGING__DISTRIBUTED": "warning",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # the worker's log; standard output is the terminal
    # Dask's nanny makes glibc return memory after every large tensor, which costs training two fifths of its CPU time.
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most glibc accepts; it ignores a larger one, and maps every tensor
    "MALLOC_ARENA_MAX": "1",  # steps run on any thread of a pool, and each would keep and fault in its own memory
    # Waiting torch threads must leave the cores to scheduler and engine soon; without any spinning an engine's small products
    # lose a third of their speed.
    "GOMP_SPINCOUNT": "20000",
}
"""Environment of every local worker process, set before torch is loaded; a variable of the driver
with that name wins."""
LOG_VARIABLE = "LIBRA_WORKER_LOG"
"""The file for a worker's standard error: logs and tracebacks, its own and those of libraries. Not
set: that of the driver."""
HASH_SEED = "6640"
"""What Dask's nannies give workers that have none."""


def worker_environment(config: RunConfig) -> dict[str, str]:
    """`WORKER_ENVIRONMENT`, and the threads of numerical libraries by ``cluster.threads``."""
    threads = config.cluster.threads or os.cpu_count() or 1
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | WORKER_ENVIRONMENT


def inherited_environment(config: RunConfig) -> dict[str, str]:
    """All variables of a local worker: this process's, changed by `worker_environment`."""
    found = {**worker_environment(config), **os.environ}
    if found.get("PYTHONHASHSEED") in (None, "0"):
        found["PYTHONHASHSEED"] = HASH_SEED
    return found | loopback_direct(found)


async def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker's process, before it connects to the scheduler."""
    end_s = end_of_job_s(os.environ)
    if end_s is not None:
        task = asyncio.ensure_future(leave_in_time(worker, end_s, DRAIN_S))
        _DRAINS.add(task)
        task.add_done_callback(_DRAINS.discard)
        return
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


def end_of_job_s(environment: Mapping[str, str]) -> float | None:
    """Time of the limit in seconds since the epoch, from ``LIBRA_JOB_END_S`` of the job's script;
    None without one."""
    end = environment.get("LIBRA_JOB_END_S", "")
    return float(end) if end.isdecimal() and int(end) > 0 else None


async def leave_in_time(worker: Worker, end_s: float, drain_s: float) -> None:
    """Wait, stop taking tasks, let those that run end, leave."""
    from distributed.core import Status  # `libra run` reads this module before it needs Dask

    await asyncio.sleep(max(0.0, end_s - drain_s - time.time()))
    logger.warning(
        "time limit in %.0f s: worker %s takes no new tasks and leaves when %d are done",
        end_s - time.time(), worker.name, worker.state.executing_count,
    )  # fmt: skip
    worker.status = Status.paused  # the scheduler is notified, and sends no more
    while worker.state.executing_count and time.time() < end_s - LEAVE_S:  # noqa: ASYNC110 (the worker's state has no event)
        await asyncio.sleep(0.2)
    await worker.close_gracefully(restart=False)
