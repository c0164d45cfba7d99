"""Calls in processes of their own, with cores that no other call has, and a bound on memory.

A worker forks one *starter* from itself when the first such call comes; it holds the tools, has one thread, and forks a process for
each call. So tools need not be importable, and no thread of the worker is copied while it holds a lock. The process of the next
call is forked beforehand, as copying the page tables of a worker takes some milliseconds, and goes through a call without a tool
once, as each page that it writes is copied then: a call waits for neither.

Invariants
----------
1. No core belongs to two calls of one worker at once, unless more are asked for than it has.
2. A call that ends, is cut off at its time-out, or takes more than its memory leaves no process of its group behind, and no other
   call notices.
3. Of a call comes text, never an object: what its process says is read as JSON.
4. A worker that dies takes its calls with it: its starter ends with its socket, and kills their groups first.
5. A group is killed by the pid of its leader only while that is this call's: the starter reaps a call no sooner than it next
   forks one, and the message with a pid is read by a task of its own, which a cancelled call does not interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from libra.child_environment import THREAD_VARIABLES
from libra.envs.retries import Refused, refused
from libra.envs.sandbox.cgroups import ControlGroup, can_make_groups
from libra.errors import ToolFault

logger = logging.getLogger(__name__)

CORES_VARIABLE = "LIBRA_CORES"
"""How many cores this call has, as `THREAD_VARIABLES` say for libraries."""
_LENGTH = struct.Struct("!Q")
MOST_BYTES = 64 << 20
PROCESSES = 512


class Bounds(NamedTuple):
    """What a call may take. ``cores`` 0: those that are not leased; ``memory_bytes`` 0: not bounded."""

    cores: int = 0
    memory_bytes: int = 0


class Ran(NamedTuple):
    """How a call ended: its value as text, or the name of its error and its text; its seconds in its process; and whether an API
    refused it for now."""

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
        """``count`` cores, the lowest free ones; those that are missing are shared with others."""
        taken = sorted(self._free)[:count]
        self._free.difference_update(taken)
        if len(taken) < count:
            taken += [core for core in self.all if core not in taken][: count - len(taken)]
        return tuple(taken)

    def give_back(self, cores: Sequence[int]) -> None:
        """These are free again."""
        self._free.update(set(cores) & set(self.all))

    @property
    def free(self) -> tuple[int, ...]:
        """Those that no call has."""
        return tuple(sorted(self._free))


def memory_enforcement() -> str:
    """How a call's memory is bounded here: ``cgroup`` or ``rlimit``."""
    return "cgroup" if can_make_groups() else "rlimit"


class ActionProcesses:
    """The calls of one worker that have processes of their own; ``to_text`` makes a returned value readable for a model."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], cores: Sequence[int], to_text: Callable[[Any], str]
    ) -> None:
        self._functions, self._to_text = dict(functions), to_text
        self.cores = CoreSet(cores)
        self._starter: socket.socket | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the starter, and the calls that run."""
        if self._starter is not None:
            self._starter.close()
            self._starter = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    async def run(self, tool: str, arguments: Mapping[str, Any], timeout_s: float, bounds: Bounds) -> Ran | None:
        """One call; None: it was cut off at its time-out. `ToolFault` if its process died, or took too much memory."""
        cores = self.cores.take(bounds.cores)
        group = await self._group(bounds, len(cores))
        mine, theirs = socket.socketpair()
        begun: asyncio.Task[int] | None = None
        try:
            mine.setblocking(False)
            self._hand_over(theirs)
            theirs.close()
            limit = bounds.memory_bytes if group is None else 0
            groups = [str(place / "cgroup.procs") for place in (group.places if group is not None else ())]
            request = pickle.dumps((tool, dict(arguments), cores, limit, groups))
            loop = asyncio.get_running_loop()
            begun = loop.create_task(_begin(mine, request))
            await asyncio.shield(begun)
            async with asyncio.timeout(timeout_s):
                (size,) = _LENGTH.unpack(await _exactly(loop, mine, _LENGTH.size))
                if size > MOST_BYTES:
                    raise ToolFault(f"tool {tool}: it returned {size} bytes; return at most {MOST_BYTES}")
                said = json.loads(await _exactly(loop, mine, size))
            api_said = Refused(said["refused"][0]) if said["refused"] is not None else None
            ran = Ran(str(said["text"]), str(said["error"]), bool(said["fault"]), float(said["ran_s"]), api_said)
            if ran.error == "MemoryError" and bounds.memory_bytes:
                raise _over(tool, bounds)
            return ran
        except TimeoutError:
            return None
        except (EOFError, ConnectionError) as error:
            if bounds.memory_bytes and (group is None or _killed_for_memory(group)):
                raise _over(tool, bounds) from error
            raise ToolFault(f"tool {tool}: its process died") from error
        finally:
            if begun is None:
                mine.close()
            elif begun.done():
                _kill(begun, mine)
            else:  # cut off before its pid is known: it is killed as soon as it is
                begun.add_done_callback(lambda task: _kill(task, mine))
            if group is not None:
                asyncio.get_running_loop().run_in_executor(None, _end, group)
            self.cores.give_back(cores)

    def _hand_over(self, theirs: socket.socket) -> None:
        """Give a call's socket to the starter; to another one where somebody, as the kernel for its memory, has killed it."""
        with self._lock:
            try:
                socket.send_fds(self._started(), [b"x"], [theirs.fileno()])
            except OSError:
                logger.warning("the process that starts calls of tools has ended; another one is started")
                self.close()
                socket.send_fds(self._started(), [b"x"], [theirs.fileno()])

    async def _group(self, bounds: Bounds, cores: int) -> ControlGroup | None:
        if not bounds.memory_bytes or not can_make_groups():
            return None
        cpus = cores or len(self.cores.all)
        group = ControlGroup.make(PROCESSES, bounds.memory_bytes, cpus)
        return group if group.places else None

    def _started(self) -> socket.socket:
        if self._starter is None:
            mine, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                _starter(theirs, self._functions, self._to_text)
            theirs.close()
            self._starter, self._pid = mine, pid
        return self._starter


def _over(tool: str, bounds: Bounds) -> ToolFault:
    return ToolFault(f"tool {tool}: killed: it took more than its {bounds.memory_bytes / 2**30:g} GiB of memory")


async def _begin(conn: socket.socket, request: bytes) -> int:
    """Send a request; the pid of its process, which leads a group."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(conn, _LENGTH.pack(len(request)) + request)
    return int(_LENGTH.unpack(await _exactly(loop, conn, _LENGTH.size))[0])


def _kill(begun: asyncio.Task[int], conn: socket.socket) -> None:
    """Kill the group of a call that has begun, unless it has ended with all of it."""
    conn.close()
    if not begun.cancelled() and begun.exception() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(begun.result(), signal.SIGKILL)


def _end(group: ControlGroup) -> None:
    group.kill()
    group.remove()


def _killed_for_memory(group: ControlGroup) -> bool:
    """Whether the kernel ended a process of the group for its memory."""
    for place in group.places:
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = Path(place / file).read_text().split()
                if "oom_kill" in words and words[words.index("oom_kill") + 1] != "0":
                    return True
    return False


async def _exactly(loop: asyncio.AbstractEventLoop, conn: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = await loop.sock_recv(conn, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


# -------------------------------------------------------------------- in the starter, and in the processes of calls


def _starter(
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
        pid, door = _spare(sock, functions, to_text)
        while True:
            message, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not message:
                break
            try:
                socket.send_fds(door, [b"x"], fds)
            except OSError:  # somebody has killed it
                os.waitpid(pid, 0)
                door.close()
                pid, door = _spare(sock, functions, to_text)
                socket.send_fds(door, [b"x"], fds)
            calls.add(pid)
            door.close()
            os.close(fds[0])  # before the next fork: only the call may hold its end
            _reap(calls)
            pid, door = _spare(sock, functions, to_text)
    finally:
        _reap(calls)
        for pid in calls:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def _spare(
    sock: socket.socket, functions: Mapping[str, Callable[..., Any]], to_text: Callable[[Any], str]
) -> tuple[int, socket.socket]:
    """A process that waits for its call, and where to send the call's socket; it ends with the starter."""
    mine, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
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
    theirs.close()
    return pid, mine


def _rehearse() -> None:
    """What a call does around its tool."""
    mine, theirs = socket.socketpair()
    with mine, theirs, theirs.makefile("rwb") as file:
        request = pickle.dumps(("", {}, (), 0, []))
        mine.sendall(_LENGTH.pack(len(request)) + request)
        (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
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
            (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
            tool, arguments, cores, memory_bytes, groups = pickle.loads(file.read(size))
            begun.put(conn)
            file.write(_LENGTH.pack(os.getpid()))
            file.flush()
            _bind(cores, memory_bytes, groups)
            said = json.dumps(_outcome(functions[tool], arguments, to_text)).encode()
            file.write(_LENGTH.pack(len(said)) + said)
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


def _outcome(
    function: Callable[..., Any], arguments: Mapping[str, Any], to_text: Callable[[Any], str]
) -> dict[str, Any]:
    started_s = time.perf_counter()
    text, error, fault, told = "", "", False, None
    try:
        text = to_text(function(**arguments))
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
