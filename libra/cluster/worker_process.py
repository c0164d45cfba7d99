"""A worker's process: environment, preload before the connection, end before a time limit, stacks.

A local worker writes errors to a file of the run and ignores Ctrl-C; standard output stays the
terminal, for prints of a user's own functions. Stacks of a worker come from its event loop. If the
loop is blocked, SIGUSR1 makes Python's faulthandler write all threads to a file in the worker's
local directory. The signal goes only to a process of this machine that has the file open.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from libra.cluster.hardware_inventory import may_have_gpu
from libra.config import RunConfig, resolve_model
from libra.errors import ModelError
from libra.processes import fork_server
from libra.processes.child_environment import loopback_direct

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import WorkerState

logger = logging.getLogger(__name__)

DRAIN_S, LEAVE_S = 120.0, 10.0
"""Seconds before a batch job's time limit in which its worker takes no new tasks, and at which it leaves."""
STACKS_FILE = "libra-stacks.txt"
ANSWER_TIMEOUT_S = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""
SIGNAL_TIMEOUT_S = 1.0
"""Seconds that faulthandler may take to write."""
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
"""The file for a worker's standard error; not set: the driver's standard error."""
PRELOAD = (
    "distributed.nanny",
    "libra.worker.runtime",
    "libra.graph.iteration",
    "libra.train.replica",
    "libra.rollout.transformers_engine",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
)
"""Modules of workers, by name, because this package must not import them."""
HASH_SEED = "6640"
"""The hash seed that Dask's nannies give to workers without one."""
_drains: set[asyncio.Task[None]] = set()
_dumps: dict[int, Any] = {}
"""The open stack file by process id, because a fork must open its own file."""


def worker_environment(config: RunConfig) -> dict[str, str]:
    """`WORKER_ENVIRONMENT`, and the threads of numerical libraries by ``cluster.threads``."""
    threads = config.cluster.threads or os.cpu_count() or 1
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | WORKER_ENVIRONMENT


def inherited_environment(config: RunConfig) -> dict[str, str]:
    """All variables of a local worker: this process's, overridden by `worker_environment`."""
    found = {**worker_environment(config), **os.environ}
    if found.get("PYTHONHASHSEED") in (None, "0"):
        found["PYTHONHASHSEED"] = HASH_SEED
    return found | loopback_direct(found)


def begin_forking(config: RunConfig) -> bool:
    """Start importing the modules of local workers; returns whether workers can be forked from
    there. That needs transformers' engine and a machine without a GPU."""
    if config.cluster.scheduler is not None or config.rollout.engine != "transformers" or may_have_gpu():
        return False
    model: list[str] = []
    try:
        kind = json.loads((Path(resolve_model(config.model.path)) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, ModelError):  # named when the model is checked
        kind = None
    if isinstance(kind, str) and kind.isidentifier():
        model = [f"transformers.models.{kind}.modeling_{kind}"]
    return fork_server.begin([*PRELOAD, *model], inherited_environment(config))


async def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker's process, before it connects to the scheduler."""
    end_s = end_of_job_s(os.environ)
    if end_s is not None:
        task = asyncio.ensure_future(leave_in_time(worker, end_s, DRAIN_S))
        _drains.add(task)
        task.add_done_callback(_drains.discard)
        return
    if path := os.environ.pop(LOG_VARIABLE, ""):
        with suppress(OSError):  # a full disk, which fails the run elsewhere
            sys.stderr.flush()
            fork_server.append_to(fork_server.STDERR, Path(path))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave_to_the_driver)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _leave_to_the_driver(number: int, frame: FrameType | None) -> None:
    """A handler, which programs of tools do not inherit; they would inherit SIG_IGN."""


def end_of_job_s(environment: Mapping[str, str]) -> float | None:
    """``LIBRA_JOB_END_S``: the job's time limit in seconds since the epoch; None without a
    limit."""
    end = environment.get("LIBRA_JOB_END_S", "")
    return float(end) if end.isdecimal() and int(end) > 0 else None


async def leave_in_time(worker: Worker, end_s: float, drain_s: float) -> None:
    """At ``drain_s`` before ``end_s`` take no new tasks, and leave after the last running task."""
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


# ---------------------------------------------------------------- stacks


def install_stacks(worker: Worker) -> None:
    """Let this worker answer requests for its stacks. A second call changes nothing."""
    worker.handlers["libra_stacks"] = stacks
    if os.getpid() in _dumps or not hasattr(faulthandler, "register"):
        return
    try:
        file = (Path(worker.local_directory) / STACKS_FILE).open("w")
    except OSError as error:
        logger.info("a blocked event loop will leave no stacks, %s cannot be written: %s", STACKS_FILE, error)
        return
    chain = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)  # the default would kill
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=chain)
    _dumps[os.getpid()] = file


def stacks() -> str:
    """All threads and asyncio tasks of this process; called on its event loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        parts.append(f"Coroutine {task.get_name()}:\n{''.join(_awaited(task.get_coro()))}")
    return "\n".join(parts)


def _awaited(coroutine: Any) -> list[str]:
    """All frames of a suspended coroutine, outermost first, unlike ``Task.get_stack``."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < 64:
        kind = next((k for k in ("cr", "gi", "ag") if getattr(coroutine, f"{k}_frame", None) is not None), None)
        if kind is None:
            return [*lines, f"  waits for {coroutine!r:.200}\n"]
        lines += traceback.format_list(traceback.extract_stack(getattr(coroutine, f"{kind}_frame"), limit=1))
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return lines


async def stacks_of(scheduler: Scheduler, ws: WorkerState) -> str:
    """Stacks of a worker's process, requested by the scheduler, or why there are none."""
    try:
        answer: str = await asyncio.wait_for(scheduler.rpc(ws.address).libra_stacks(), ANSWER_TIMEOUT_S)
        return f"(answered by the worker itself)\n{answer}"
    except TimeoutError:
        why = f"its event loop did not answer within {ANSWER_TIMEOUT_S:g} s"
    except Exception as error:  # noqa: BLE001 - boundary to a process in an unknown state; the error is the finding
        why = f"the request failed: {type(error).__name__}: {error}"
    dump = Path(ws.local_directory) / STACKS_FILE
    if not _holds_open(ws.pid, dump):
        return f"({why}; process {ws.pid} is not on the scheduler's machine, or has no {STACKS_FILE})\n"
    before = size = dump.stat().st_size
    os.kill(ws.pid, signal.SIGUSR1)
    until_s = time.monotonic() + SIGNAL_TIMEOUT_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        last, size = size, dump.stat().st_size
        if size == last > before:
            break
    if text := dump.read_bytes()[before:].decode(errors="replace"):
        return f"({why}; written by faulthandler on SIGUSR1)\n{text}"
    return f"({why}, nor did process {ws.pid} answer a signal: {_state(ws.pid)})\n"


def _holds_open(pid: int, path: Path) -> bool:
    try:
        return any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it has ended"
    return f"it is stopped; kill -CONT {pid} continues it" if letter in "Tt" else f"state {letter} of proc(5)"
