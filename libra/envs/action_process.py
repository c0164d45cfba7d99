"""Calls in their own processes, with cores that no other call has and a bound on memory.

For the first such call a worker forks a single-threaded *starter*, which holds the tools and forks
a process for each call. Tools therefore need not be importable, and no fork copies a worker's
thread that holds a lock.

Invariants
----------
1. Two calls of a worker share a core only if calls demand more cores than the worker has.
2. A call that ends, times out or exceeds its memory leaves no process of its group behind, and
   other calls continue.
3. A call returns JSON text, never an object. Malformed text, or a process that the machine refuses,
   fails only that call.
4. The calls of a worker end with the worker: its starter then reads the end of its socket and kills
   their groups first.
5. A group is killed by its leader's pid only while the pid belongs to the call: the starter reaps a
   call no sooner than it forks the next, and a separate task, which a cancelled call does not
   interrupt, reads the pid.
6. Only the call holds the other end of its socket: end of file means that the call has ended or
   never started.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import pickle
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from libra.envs.retries import Refused, refused
from libra.envs.sandbox.confined import ControlGroup, can_make_groups
from libra.errors import ToolFault
from libra.processes.child_environment import THREAD_VARIABLES
from libra.seals import parsed_json
from libra.untrusted import error_text, storable

logger = logging.getLogger(__name__)

GPUS_VARIABLE, CORES_VARIABLE = "CUDA_VISIBLE_DEVICES", "LIBRA_CORES"
"""Variables of a call with its GPUs, and with its number of cores."""
LENGTH = struct.Struct("!Q")

GPU_WAIT_S = 600.0
"""Longest wait for GPUs of other processes' calls or services."""
KILLED_S = 5.0
"""Seconds in which a killed process frees its GPUs."""
MOST_BYTES = 64 << 20
PROCESSES = 512
BEGIN_S, SEND_S, END_S = 120.0, 10.0, 5.0
"""Longest seconds for a call's start, for passing its socket to the starter, and for the
starter's end."""


class Bounds(NamedTuple):
    """Bounds of a call: own ``cores`` (0 uses unleased cores), memory (0 is unbounded), and
    GPUs."""

    cores: int = 0
    memory_bytes: int = 0
    gpus: int = 0


class HeldGpus(Protocol):
    """GPUs of one call; ``entries`` are values of CUDA_VISIBLE_DEVICES."""

    @property
    def entries(self) -> tuple[str, ...]: ...

    def release(self) -> None: ...


class GpusOfCalls(Protocol):
    """GPUs of a worker for calls of tools (`libra.cluster.device_lock`)."""

    async def taken(self, count: int, who: str, limit_s: float) -> HeldGpus: ...


class Ran(NamedTuple):
    """The end of a call: value as text, or an error's name and text; seconds; an API's refusal."""

    text: str
    error: str
    fault: bool
    ran_s: float
    refused: Refused | None = None


class CoreSet:
    """The cores of a worker, and which are free."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.all = tuple(cores)
        self._free = set(cores)

    def take(self, count: int) -> tuple[int, ...]:
        """The lowest ``count`` free cores; if too few are free, cores of other calls are added."""
        taken = sorted(self._free)[:count]
        self._free.difference_update(taken)
        if len(taken) < count:
            taken += [core for core in self.all if core not in taken][: count - len(taken)]
        return tuple(taken)

    def give_back(self, cores: Sequence[int]) -> None:
        """Free these cores."""
        self._free.update(set(cores) & set(self.all))

    @property
    def free(self) -> tuple[int, ...]:
        """Cores without a call."""
        return tuple(sorted(self._free))


def memory_enforcement() -> str:
    """``cgroup`` or ``rlimit``, whichever bounds a call's memory on this machine."""
    return "cgroup" if can_make_groups() else "rlimit"


class ActionProcesses:
    """Calls of one worker in their own processes; ``to_text`` converts a value for the model."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        cores: Sequence[int],
        to_text: Callable[[Any], str],
        gpus: GpusOfCalls | None = None,
    ) -> None:
        self._functions, self._to_text, self._gpus = dict(functions), to_text, gpus
        self.cores = CoreSet(cores)
        self._starter: socket.socket | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Fork the starter before the first call."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the starter and its calls."""
        if self._starter is None:
            return
        self._starter.close()
        self._starter, until_s = None, time.monotonic() + END_S
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self._pid, os.WNOHANG)[0]:
                if time.monotonic() > until_s:  # it was stopped; its calls end with their sockets
                    os.kill(self._pid, signal.SIGKILL)
                time.sleep(0.001)

    async def run(self, tool: str, arguments: Mapping[str, Any], timeout_s: float, bounds: Bounds) -> Ran | None:
        """Run one call; None after its time-out.

        `ToolFault` if no process could start, the process died, exceeded its memory or wrote
        malformed text, or the call got no GPUs for `GPU_WAIT_S`.
        """
        with contextlib.ExitStack() as stack:
            gpus: tuple[str, ...] = ()
            if bounds.gpus and self._gpus is not None:
                held = await self._gpus.taken(bounds.gpus, f"tool {tool}", GPU_WAIT_S)
                stack.callback(held.release)
                gpus = held.entries
            cores = self.cores.take(bounds.cores)
            stack.callback(self.cores.give_back, cores)
            group = ControlGroup(())
            if bounds.memory_bytes:
                group = ControlGroup.make(PROCESSES, bounds.memory_bytes, len(cores) or len(self.cores.all))
                if group.places:
                    stack.callback(lambda: asyncio.get_running_loop().run_in_executor(None, _end, group))
            groups = [str(place / "cgroup.procs") for place in group.places]
            rlimit = 0 if groups else bounds.memory_bytes
            request = pickle.dumps((tool, dict(arguments), cores, rlimit, groups, gpus))
            return await self._called(tool, request, timeout_s, bounds, group)

    async def _called(
        self, tool: str, request: bytes, timeout_s: float, bounds: Bounds, group: ControlGroup
    ) -> Ran | None:
        memory = f"its {bounds.memory_bytes / 2**30:g} GiB of memory"
        over = ToolFault(f"tool {tool}: killed: it took more than {memory}")
        not_started = f"tool {tool}: no process could be started for its call"
        try:
            conn = self._handed_over()
        except OSError as error:
            raise ToolFault(f"{not_started}: {error.strerror or error}") from error
        starter, begun = self._pid, asyncio.ensure_future(_begin(conn, request))
        try:
            if not (await asyncio.wait({begun}, timeout=BEGIN_S))[0]:
                if self._pid == starter:
                    self.close()
                raise ToolFault(f"tool {tool}: no process began its call within {BEGIN_S:g} s")
            call = begun.result()
            async with asyncio.timeout(timeout_s):
                (size,) = LENGTH.unpack(await call.reader.readexactly(LENGTH.size))
                if size > MOST_BYTES:
                    raise ToolFault(f"tool {tool}: it returned {size} bytes; return at most {MOST_BYTES}")
                ran = _read(tool, await call.reader.readexactly(size))
            if ran.error == "MemoryError" and bounds.memory_bytes:
                raise over
            return ran
        except TimeoutError:
            return None
        except (EOFError, ConnectionError) as error:
            if begun.exception() is not None:
                raise ToolFault(not_started) from error
            if _killed_for_memory(group):
                raise over from error
            maybe = f"; it may have taken more than {memory}" if bounds.memory_bytes else ""
            raise ToolFault(f"tool {tool}: its process died{maybe}") from error
        finally:
            ending = asyncio.ensure_future(_killed(begun))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            if bounds.gpus:  # its process must have freed them, even if this call is cancelled
                try:
                    await asyncio.shield(ending)
                except asyncio.CancelledError:
                    await ending
                    raise

    def _handed_over(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"x"], [theirs.fileno()])
                except OSError:
                    logger.warning("the process that starts calls of tools has ended; another one is started")
                    self.close()
                    socket.send_fds(self._started(), [b"x"], [theirs.fileno()])
        except BaseException:
            mine.close()
            raise
        return mine

    def _started(self) -> socket.socket:
        if self._starter is None:
            mine, theirs = socket.socketpair()
            with theirs:
                pid = os.fork()
                if pid == 0:
                    _start_calls(theirs, self._functions, self._to_text)
            mine.settimeout(SEND_S)
            self._starter, self._pid = mine, pid
        return self._starter


class _Begun(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int


async def _begin(conn: socket.socket, request: bytes) -> _Begun:
    reader, writer = await asyncio.open_connection(sock=conn)
    try:
        writer.write(LENGTH.pack(len(request)) + request)
        return _Begun(reader, writer, int(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]))
    except BaseException:
        writer.close()
        raise


async def _killed(begun: asyncio.Future[_Begun]) -> None:
    """Kill the process group of a call once its pid is known, and wait for its leader's end."""
    with contextlib.suppress(EOFError, OSError, TimeoutError):
        call = await begun
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(call.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILLED_S):
                while await call.reader.read(1 << 16):
                    pass
        finally:
            call.writer.close()


def _read(tool: str, data: bytes) -> Ran:
    try:
        told = parsed_json(data)
        refusal = None
        if told["refused"] is not None:
            (after_s,) = told["refused"]
            refusal = Refused(None if after_s is None else float(after_s))
        ran = Ran(str(told["text"]), storable(str(told["error"])), bool(told["fault"]), float(told["ran_s"]), refusal)
        if not 0 <= ran.ran_s < math.inf:
            raise ValueError(f"it ran for {ran.ran_s} s")
        return ran
    except (ValueError, TypeError, KeyError) as error:
        raise ToolFault(f"tool {tool}: the message of its process cannot be read ({error_text(error)})") from error


def _end(group: ControlGroup) -> None:
    group.kill()
    group.remove()


def _killed_for_memory(group: ControlGroup) -> bool:
    for path in (place / file for place in group.places for file in ("memory.events", "memory.oom_control")):
        with contextlib.suppress(OSError):
            words = path.read_text().split()
            if "oom_kill" in words and words[words.index("oom_kill") + 1] != "0":
                return True
    return False


def _start_calls(
    sock: socket.socket, functions: Mapping[str, Callable[..., Any]], to_text: Callable[[Any], str]
) -> NoReturn:
    """In the starter, fork a process for each socket that arrives, until the worker is gone."""
    calls: set[int] = set()
    try:
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the starter could not wait for calls
        while True:
            message, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not message:
                break
            with contextlib.suppress(OSError):  # the machine has no process left: this call ends
                if (pid := os.fork()) == 0:
                    sock.close()
                    _call(socket.socket(fileno=fds[0]), functions, to_text)
                calls.add(pid)
            os.close(fds[0])  # before the next fork: only the call may hold its end
            for pid in list(calls):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    calls.discard(pid)
    finally:
        for pid in calls:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def _call(conn: socket.socket, functions: Mapping[str, Callable[..., Any]], to_text: Callable[[Any], str]) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with conn.makefile("rwb") as file:
            (size,) = LENGTH.unpack(file.read(LENGTH.size))
            tool, arguments, cores, memory_bytes, groups, gpus = pickle.loads(file.read(size))
            threading.Thread(target=_end_with, args=(conn,), daemon=True).start()
            file.write(LENGTH.pack(os.getpid()))
            file.flush()
            _bind(cores, memory_bytes, groups)
            if gpus:
                os.environ[GPUS_VARIABLE] = ",".join(gpus)
            message = json.dumps(_outcome(functions[tool], arguments, to_text)).encode()
            file.write(LENGTH.pack(len(message)) + message)
            file.flush()
    finally:
        os._exit(0)


def _end_with(conn: socket.socket) -> None:
    """Kill the call's processes once the worker closes its end of the socket."""
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


def _outcome(
    function: Callable[..., Any], arguments: Mapping[str, Any], to_text: Callable[[Any], str]
) -> dict[str, Any]:
    async def awaited(value: Awaitable[Any]) -> Any:
        return await value

    started_s = time.perf_counter()
    text, error, fault, refusal = "", "", False, None
    try:
        value = function(**arguments)
        text = to_text(asyncio.run(awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as raised:  # noqa: BLE001 boundary: the process is the call's own, so even an exit is only data
        error, fault, refusal = type(raised).__name__, isinstance(raised, ToolFault), refused(raised, time.time())
        try:
            text = str(raised)
        except BaseException:  # noqa: BLE001 its text is the tool's code, too
            text = "an error without a text"
    refusal_s, ran_s = None if refusal is None else [refusal.retry_after_s], time.perf_counter() - started_s
    return {"text": text, "error": error, "fault": fault, "refused": refusal_s, "ran_s": ran_s}
