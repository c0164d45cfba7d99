"""An environment whose trajectories have a session each: a process that counts, which stands for a shell or a browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import libra
from libra.envs import FunctionEnvironment
from libra.testing import FixedTurns
from libra.types import ToolCall

COUNTER = """
import os, sys
n = 0
for line in sys.stdin:
    n = 0 if line == "reset\\n" else n + 1
    print(n, os.getpid(), flush=True)
"""


class Shell:
    """A process; `ask` gives how often it was asked since it was reset, and its process id."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", COUNTER], **pipes)

    def ask(self, line: str) -> str:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Shells(FixedTurns):
    """Every turn calls `look`, which notes in ``notes``/TRAJECTORY what its session said. In the second turn of ``victim``
    its worker (``kill`` worker) or its session (session) is killed, once."""

    session = libra.session(
        Shell,
        reset=lambda shell: shell.ask("reset"),
        close=Shell.close,
        alive=lambda shell: shell.process.poll() is None,
    )

    def __init__(self, *, notes: str, victim: str = "", kill: str = "", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.notes, self.victim, self.kill = Path(notes), victim, kill
        self.tools = (libra.tool(self.look),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("look", {}),)

    def look(self, session: Shell, action_id: str) -> str:
        """Ask the session.

        Returns:
            How often it was asked.
        """
        trajectory, turn, _ = action_id.split("/")
        count, process = session.ask("look").split()
        with (self.notes / trajectory).open("a") as file:
            file.write(f"{turn} {count} {process} {os.getpid()}\n")
        if (trajectory, turn) == (self.victim, "1"):
            if self.kill == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            session.process.kill()
            session.process.wait()
        return count


def asked(session: Shell) -> str:
    """Ask the session.

    Returns:
        How often it was asked.
    """
    return session.ask("look").split()[0]


def cleared(shell: Shell) -> None:
    """Make a session ready for another trajectory."""
    shell.ask("reset")


def one(completion: str) -> float:
    """A reward."""
    return float(len(completion))


class Calling(FunctionEnvironment):
    """Functions as tools, the first of which every turn calls."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("asked", {}),)
