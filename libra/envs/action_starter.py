"""The starter of a worker's calls (`libra.envs.action_process`), and what the process of a call does.

Invariants
----------
1. Of a call's socket only the call holds this end: where it closes, the call has ended, or none began.
2. Where no process can be forked, as by a bound on processes, the call that would have had it ends; those that run go on, and the
   next call tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from libra.envs.retries import refused
from libra.errors import ToolFault
from libra.processes.child_environment import THREAD_VARIABLES

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs this call has, where it takes some."""
CORES_VARIABLE = "LIBRA_CORES"
"""How many cores this call has, as `THREAD_VARIABLES` say for libraries."""
LENGTH = struct.Struct("!Q")


class Spare(NamedTuple):
    """A process that waits for its call, and where to send the call's socket; it ends with the starter."""

    pid: int
    door: socket.socket


def start_calls(
    sock: socket.socket, functions: Mapping[str, Callable[..., Any]], to_text: Callable[[Any], str]
) -> NoReturn:
    """Fork a process for each socket that arrives, until the worker is gone."""
    calls: set[int] = set()
    try:
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, nobody could wait for a call

        def fork() -> Spare | None:
            return _spare(sock, functions, to_text)

        spare = fork()
        while True:
            message, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not message:
                break
            if (pid := _handed_over(fds, spare, fork)) is not None:
                calls.add(pid)
            os.close(fds[0])  # before the next fork: only the call may hold its end
            _reap(calls)
            spare = fork()
    finally:
        _reap(calls)
        for pid in calls:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def _handed_over(fds: Sequence[int], spare: Spare | None, fork: Callable[[], Spare | None]) -> int | None:
    """The process that has the call's socket now; None: there is none."""
    for waiting in (spare, None):
        if (taken := waiting or fork()) is None:
            continue
        with taken.door:
            try:
                socket.send_fds(taken.door, [b"x"], fds)
                return taken.pid
            except OSError:  # somebody has killed it
                os.waitpid(taken.pid, 0)
    return None


def _spare(
    sock: socket.socket, functions: Mapping[str, Callable[..., Any]], to_text: Callable[[Any], str]
) -> Spare | None:
    """A process that waits for its call; None: none can be forked."""
    try:
        mine, theirs = socket.socketpair()
    except OSError:
        return None
    with theirs:
        try:
            pid = os.fork()
        except OSError:
            mine.close()
            return None
        if pid == 0:
            try:
                sock.close()
                mine.close()
                os.setsid()
                _rehearse()
                begun = queue.SimpleQueue[socket.socket]()
                threading.Thread(target=_end_with, args=(begun,), daemon=True).start()
                message, fds, _, _ = socket.recv_fds(theirs, 1, 1)
                theirs.close()
                if message:
                    _call(socket.socket(fileno=fds[0]), begun, functions, to_text)
            finally:
                os._exit(0)
    return Spare(pid, mine)


def _rehearse() -> None:
    """What a call does around its tool."""
    mine, theirs = socket.socketpair()
    with mine, theirs, theirs.makefile("rwb") as file:
        request = pickle.dumps(("", {}, (), 0, [], ()))
        mine.sendall(LENGTH.pack(len(request)) + request)
        (size,) = LENGTH.unpack(file.read(LENGTH.size))
        pickle.loads(file.read(size))
        file.write(json.dumps(_outcome(str, {}, str)).encode())
        file.flush()


def _reap(calls: set[int]) -> None:
    """Forget the calls that have ended, with their pids."""
    for pid in list(calls):
        if os.waitpid(pid, os.WNOHANG)[0]:
            calls.discard(pid)


def _call(
    conn: socket.socket,
    begun: queue.SimpleQueue[socket.socket],
    functions: Mapping[str, Callable[..., Any]],
    to_text: Callable[[Any], str],
) -> NoReturn:
    """Read what to call, call it, send what came of it."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with conn.makefile("rwb") as file:
            (size,) = LENGTH.unpack(file.read(LENGTH.size))
            tool, arguments, cores, memory_bytes, groups, gpus = pickle.loads(file.read(size))
            begun.put(conn)
            file.write(LENGTH.pack(os.getpid()))
            file.flush()
            _bind(cores, memory_bytes, groups)
            if gpus:
                os.environ[GPUS_VARIABLE] = ",".join(gpus)
            said = json.dumps(_outcome(functions[tool], arguments, to_text)).encode()
            file.write(LENGTH.pack(len(said)) + said)
            file.flush()
    finally:
        os._exit(0)


def _end_with(begun: queue.SimpleQueue[socket.socket]) -> None:
    """End the call and what it started once the worker has closed its end, of which nothing else is to come: it was cut off, maybe
    before the worker knew its pid, or the worker died."""
    conn = begun.get()
    with contextlib.suppress(OSError):
        conn.recv(1)
    os.killpg(os.getpid(), signal.SIGKILL)


def _bind(cores: Sequence[int], memory_bytes: int, groups: Sequence[str]) -> None:
    for path in groups:
        Path(path).write_text(str(os.getpid()))
    if cores:
        os.sched_setaffinity(0, cores)
        for name in (*THREAD_VARIABLES, CORES_VARIABLE):
            os.environ[name] = str(len(cores))
    if memory_bytes:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _outcome(
    function: Callable[..., Any], arguments: Mapping[str, Any], to_text: Callable[[Any], str]
) -> dict[str, Any]:
    started_s = time.perf_counter()
    text, error, fault, told = "", "", False, None
    try:
        value = function(**arguments)
        text = to_text(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as raised:  # noqa: BLE001 boundary: the process is the call's own, so even an exit is only data
        error, fault, told = type(raised).__name__, isinstance(raised, ToolFault), refused(raised, time.time())
        try:
            text = str(raised)
        except BaseException:  # noqa: BLE001 its text is the tool's code, too
            text = "an error without a text"
    api_said = None if told is None else [told.retry_after_s]
    return {
        "text": text, "error": error, "fault": fault, "refused": api_said, "ran_s": time.perf_counter() - started_s,
    }  # fmt: skip
