"""The agents of a worker, run by the program `libra.agents.runner` in their own environment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra.agents import runner
from libra.agents.agent_session import Ended
from libra.errors import EnvironmentFault
from libra.processes.child_environment import child_environment

_LINE_BYTES = 8 << 20
"""Longest line: above `runner.MAX_RESULT_BYTES`, of which JSON may write each byte as 6."""
IMPORT_S = 180.0
"""Longest seconds for the import of an agent's function."""
_LATE_S, _STACKS_S = 10.0, 1.0
"""Further seconds for the report of a slow import, and for its stacks."""


class AgentProcesses:
    """Starts and stops agents, each a call of ``function`` or a process of ``command``.

    ``function`` is ``package.module:attribute``, imported within ``import_s``; ``command`` is a
    command line. ``venv`` is the agents' virtual environment, by default this process's. Agents get
    the variables named in ``env`` beside `libra.processes.child_environment`.
    """

    def __init__(
        self, *, function: str | None, command: str | None, venv: Path | None, env: Sequence[str] = (),
        import_s: float = IMPORT_S,
    ) -> None:  # fmt: skip
        self._first = {"function": function, "command": command, "path": _import_path(venv), "import_s": import_s}
        self._venv, self._env, self._import_s = venv, tuple(env), import_s
        self._program: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._running: dict[int, Callable[[Ended], None]] = {}
        self._starting = asyncio.Lock()

    async def prepare(self) -> None:
        """Start the program, which imports the function. EnvironmentFault if the program fails;
        ConfigError if a variable of ``env`` is not set."""
        async with self._starting:
            if self._program is None or self._program.returncode is not None:
                if self._reading is not None:
                    await asyncio.wait({self._reading})  # it reports the agents of the program that ended
                await self._start_program()

    async def start(self, env: Mapping[str, str], task: Mapping[str, Any], ended: Callable[[Ended], None]) -> int:
        """Start an agent and call ``ended`` at its end; returns its number. EnvironmentFault if the
        agent cannot start."""
        await self.prepare()
        number = next(self._numbers)
        self._running[number] = ended
        self._send({"start": number, "env": dict(env), "task": dict(task)})
        return number

    def stop(self, number: int) -> None:
        """Kill an agent and its processes, without a call of ``ended``."""
        if self._running.pop(number, None) is not None:
            self._send({"stop": number})

    async def close(self) -> None:
        """Kill all agents."""
        self._running.clear()
        if self._program is not None and self._program.returncode is None:
            assert self._program.stdin is not None
            self._program.stdin.close()
            try:
                await asyncio.wait_for(self._program.wait(), 2 * runner.GRACE_S)
            except TimeoutError:
                self._program.kill()
        if self._reading is not None:
            self._reading.cancel()

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._program is not None and self._program.stdin is not None and not self._program.stdin.is_closing():
            self._program.stdin.write(json.dumps(message).encode() + b"\n")

    async def _start_program(self) -> None:
        python = sys.executable if self._venv is None else str(self._venv / "bin" / "python")
        env = child_environment(self._env, where="agent.env")
        env["PATH"] = f"{Path(python).parent}{os.pathsep}{env.get('PATH', '')}"
        if self._venv is not None:
            env["VIRTUAL_ENV"] = str(self._venv)
        try:
            program = await asyncio.create_subprocess_exec(
                python, runner.__file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env,
                limit=_LINE_BYTES, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentFault(f"agent.venv: {python} cannot be run: {error.strerror}") from error
        self._program = program
        self._send(self._first)
        assert program.stdout is not None
        if wrong := await self._not_ready(python, program.stdout):
            self._program = None
            if program.returncode is None:  # otherwise its pid may belong to another process
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
            await program.wait()
            raise EnvironmentFault(f"agent.function: {self._first['function']!r} {wrong}")
        self._reading = asyncio.create_task(self._read(program.stdout))

    async def _not_ready(self, python: str, lines: asyncio.StreamReader) -> str:
        stack = b""
        try:
            async with asyncio.timeout(self._import_s + _LATE_S):
                line = await lines.readline()
            if line.startswith(b"Timeout"):  # the stacks of its threads follow
                async with asyncio.timeout(_STACKS_S):
                    while line := await lines.readline():
                        stack += line
                raise TimeoutError
        except TimeoutError:
            return (
                f"was not imported within {self._import_s:g} s by {python}{_innermost(stack)}; move what takes so long "
                "from the module's top level into the function"
            )
        answer = json.loads(line) if line else {"ready": False, "error": "its process ended"}
        if answer["ready"]:
            return ""
        return (
            f"cannot be imported by {python}: {answer['error']}; install what it needs there, or type PYTHONPATH=DIRECTORY before "
            "libra"
        )

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            message = json.loads(line)
            if (ended := self._running.pop(message["ended"], None)) is not None:
                ended(Ended(message["result"], message["error"]))
        self._program, lost = None, list(self._running.values())
        self._running.clear()
        for ended in lost:
            ended(Ended(None, "the program that runs agents has ended", lost=True))


def _innermost(stacks: bytes) -> str:
    """The innermost frames of the main thread, whose stack `faulthandler` writes last."""
    frames = [line.strip() for line in stacks.decode(errors="replace").rpartition("Thread 0x")[2].splitlines()]
    own = [frame for frame in frames if frame.startswith("File ") and "<frozen " not in frame][:3]
    return f": it was at {', called at '.join(own)}" if own else ""


def _import_path(venv: Path | None) -> list[str]:
    """Directories of the user's own modules, without packages that only this environment has."""
    own = [entry for entry in sys.path if entry and "site-packages" not in entry]
    if venv is None:
        return [*own, *(entry for entry in sys.path if "site-packages" in entry)]
    return [entry for entry in own if not entry.startswith((sys.base_prefix, sys.prefix))]
