"""Stacks of a worker's threads and coroutines, also while its event loop is blocked.

A worker whose event loop runs answers ``libra_stacks`` itself. A blocked one cannot, so on SIGUSR1
Python's faulthandler writes its threads to a file in its local directory, also from within C code.
The signal goes only to a process of this machine that has that file open: a process id alone may
belong to another program.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import WorkerState

logger = logging.getLogger(__name__)

FILE = "libra-stacks.txt"
ANSWER_TIMEOUT_S = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""
SIGNAL_TIMEOUT_S = 1.0
"""Seconds that faulthandler may take to write."""

_dumps: dict[int, Any] = {}
"""The open file of this process, by process id (a fork inherits it, and must open its own)."""


def install(worker: Worker) -> None:
    """Let this worker answer requests for its stacks. A second call changes nothing."""
    worker.handlers["libra_stacks"] = stacks
    if os.getpid() in _dumps or not hasattr(faulthandler, "register"):
        return
    try:
        file = (Path(worker.local_directory) / FILE).open("w")
    except OSError as error:
        logger.info("a blocked event loop will leave no stacks, %s cannot be written: %s", FILE, error)
        return
    others = signal.getsignal(signal.SIGUSR1) not in (
        signal.SIG_DFL,
        signal.SIG_IGN,
    )  # chaining to the default would kill
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=others)
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
    """Frames of a suspended coroutine, outermost first; ``Task.get_stack`` gives only the first."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < 64:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                lines += traceback.format_list(traceback.extract_stack(frame, limit=1))
                coroutine = getattr(coroutine, f"{kind}_await", None) or getattr(coroutine, "gi_yieldfrom", None)
                break
        else:
            lines.append(f"  waits for {coroutine!r:.200}\n")
            break
    return lines


async def stacks_of(scheduler: Scheduler, ws: WorkerState) -> str:
    """Stacks of a worker's process, requested by the scheduler; else why there are none."""
    try:
        answer: str = await asyncio.wait_for(scheduler.rpc(ws.address).libra_stacks(), ANSWER_TIMEOUT_S)
        return f"(answered by the worker itself)\n{answer}"
    except TimeoutError:
        why = f"its event loop did not answer within {ANSWER_TIMEOUT_S:g} s"
    except Exception as error:  # noqa: BLE001 - boundary to a process in an unknown state; the error is the finding
        why = f"the request failed: {type(error).__name__}: {error}"
    dump = Path(ws.local_directory) / FILE
    if not _holds_open(ws.pid, dump):
        return f"({why}; process {ws.pid} is not on the scheduler's machine, or has no {FILE})\n"
    before = dump.stat().st_size
    os.kill(ws.pid, signal.SIGUSR1)
    size, loop = before, asyncio.get_running_loop()
    deadline_s = loop.time() + SIGNAL_TIMEOUT_S
    while loop.time() < deadline_s:
        await asyncio.sleep(0.05)
        last, size = size, dump.stat().st_size
        if size == last > before:
            break
    text = dump.read_bytes()[before:].decode(errors="replace")
    if not text:
        return f"({why}, nor did process {ws.pid} answer a signal: {_state(ws.pid)})\n"
    return f"({why}; written by faulthandler on SIGUSR1)\n{text}"


def _holds_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine has this file open; False if that is not visible (no /proc,
    another user's)."""
    try:
        return any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _state(pid: int) -> str:
    """The kernel's state of a process, in words."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "it has ended"
    if letter in "Tt":
        return f"it is stopped; kill -CONT {pid} continues it"
    return {"D": "it waits for a device or a network file system", "Z": "it has died"}.get(letter, f"state {letter}")
