"""A persistent sandbox: one supervisor runs one program after another and keeps files in /tmp between them.

Invariants
----------
1. `Session.run` returns within its ``timeout_s`` plus `GRACE_S`, whatever the program does, and leaves no process of
   it.
2. Whatever goes wrong inside is the program's failure, a `Finished`; only what the machine refuses raises: a sandbox that cannot be
   started, a supervisor that cannot fork while nothing runs in it.
3. At most ``output_bytes`` and ``result_bytes`` of a program's output and result are ever in memory here.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from libra.envs.sandbox.cgroups import ControlGroup
from libra.envs.sandbox.confined import BUBBLEWRAP, Limits, command, reserve_uid, system_call_filter
from libra.processes.child_environment import chosen

GRACE_S = 2.0
"""Seconds after a program's deadline until the whole sandbox is killed, if its supervisor has not answered."""
START_S = 20.0
"""Seconds that a supervisor may take to start, on a loaded machine too."""
MAX_ANSWER_BYTES = 64 * 2**20
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="libra-sandbox")
"""Starts supervisors: the kernel ends them with the thread that started them, and threads of tool calls end."""


class SandboxFailed(OSError):
    """The sandbox could not be started, or not start a program; a fault of the machine, never of a program."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes
    ----------
    exit_code : int or None
        Negative where a signal ended it; None if it was cut off, or took its supervisor with it.
    output : str
        Standard output and error together.
    result : str or None
        JSON of what the called function returned; None if nothing was called, or it did not return.
    """

    exit_code: int | None
    output: str
    result: str | None


class Session:
    """One sandbox on this machine, `BUBBLEWRAP` or `NONE`. A context manager; `close` kills everything in it and deletes its files.

    Raises
    ------
    SandboxFailed
        It cannot be started.
    """

    def __init__(self, limits: Limits, isolation: str = BUBBLEWRAP) -> None:
        self.limits, self.isolation = limits, isolation
        self._process: subprocess.Popen[bytes] | None = None
        self._work: Path | None = None
        self._group = ControlGroup(())
        self._uid: tuple[int, socket.socket] | None = None
        self._requests = self._answers = -1
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
        """Run a program, then call one of its functions; `Finished.result` is JSON of what it returned."""
        request = {"source": source, "call": {"function": function, "arguments": json.dumps(arguments)}}
        return self._ask(request, timeout_s, 20_000, result_bytes)

    def close(self) -> None:
        """Kill every process in it, and delete its files; never raises because of what a program left behind."""
        process, self._process = self._process, None
        if process is not None:
            for descriptor in (self._requests, self._answers):
                os.close(descriptor)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            self._group.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        self._group.remove()
        self._group = ControlGroup(())
        if self._uid is not None:
            self._uid[1].close()
            self._uid = None
        work, self._work = self._work, None
        if work is not None:
            _delete(work)

    # ---------------------------------------------------------------- inside

    def _start(self) -> None:
        confined, limits = self.isolation == BUBBLEWRAP, self.limits
        inside_requests, self._requests = os.pipe()
        self._answers, inside_answers = os.pipe()
        inside, filtered = [inside_requests, inside_answers], None
        try:
            if confined:
                filtered = os.memfd_create("libra-filter")
                inside.append(filtered)
                os.pwrite(filtered, system_call_filter(), 0)
                self._uid = reserve_uid()
            else:
                self._work = Path(tempfile.mkdtemp(prefix="libra-sandbox-"))
            self._group = ControlGroup.make(limits.processes, 2 * limits.memory_bytes + limits.disk_bytes, limits.cpus)
            uid = None if self._uid is None else self._uid[0]
            words = command(limits, inside_requests, inside_answers, uid=uid, filtered=filtered)
            self._process = _STARTER.submit(
                subprocess.Popen,
                self._group.around(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=self._work or "/",
                env={"PATH": os.defpath} | chosen({"PATH"} & os.environ.keys()),
                pass_fds=inside,
                start_new_session=True,
            ).result()
        except OSError as error:
            os.close(self._requests)
            os.close(self._answers)
            self.close()
            raise SandboxFailed(f"{self.isolation}: cannot be started: {error}") from error
        finally:
            for descriptor in inside:
                os.close(descriptor)
        ready = self._answer(time.monotonic() + START_S)
        if ready is None or not ready.get("ready"):
            self._process.kill()
            said = self._process.stderr.read(2000).decode(errors="replace").strip() if self._process.stderr else ""
            self.close()
            raise SandboxFailed(
                f"{self.isolation}: does not start: {said.splitlines()[-1] if said else 'it said nothing'}"
            )

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
        if answer is None:  # the program killed or stopped its supervisor, or filled what that needs
            self.close()
            return Finished(None, "[the program ended the sandbox that it ran in]", None)
        if "fault" in answer:
            self.close()
            raise SandboxFailed(f"{self.isolation}: {answer['fault']}")
        output = _text(answer.get("output"))
        result = _text(answer.get("result")) if request.get("call") else ""
        code = answer.get("exit_code")
        return Finished(code if isinstance(code, int) else None, output, result or None)

    def _send(self, data: bytes, deadline: float) -> bool:
        os.set_blocking(self._requests, False)
        view = memoryview(data)
        while view:
            if not _ready(self._requests, select.POLLOUT, deadline):
                return False
            view = view[os.write(self._requests, view) :]
        return True

    def _answer(self, deadline: float) -> dict[str, Any] | None:
        """The next answer; None if none comes before the deadline, or it is not an answer."""
        head = self._read(4, deadline)
        if head is None:
            return None
        length = struct.unpack("!I", head)[0]
        data = self._read(length, deadline) if length <= MAX_ANSWER_BYTES else None
        try:
            answer = json.loads(data) if data is not None else None
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _read(self, count: int, deadline: float) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            if not _ready(self._answers, select.POLLIN, deadline):
                return None
            got = os.read(self._answers, min(65536, count - len(parts)))
            if not got:
                return None
            parts += got
        return bytes(parts)


def _ready(descriptor: int, what: int, deadline: float) -> bool:
    """Whether ``descriptor`` can be read or written before the deadline; of any number, which select cannot."""
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(max(0.0, 1000.0 * (deadline - time.monotonic()))))


def _text(raw: Any) -> str:
    """UTF-8 text of bytes that were sent as Latin-1; invalid bytes are replaced."""
    return raw.encode("latin-1", "replace").decode("utf-8", "replace") if isinstance(raw, str) else ""


def _delete(folder: Path) -> None:
    """Delete a folder whatever a program made in it: folders nested deeper than paths may be long, or that may not be entered."""
    try:  # Python's own removal recurses too far in deep folders
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], capture_output=True, timeout=60, check=False)
    except subprocess.SubprocessError:
        return
    except OSError:  # the machine starts no process
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
