"""A command under a pseudo-terminal, as its user has it: what it writes with the seconds since its
start, and Ctrl-C as that key.

Invariants
----------
1. The command is the leader of a session whose terminal this is: Ctrl-C reaches every process of
   its foreground group.
2. `Terminal.close` leaves none of its processes behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    """A running command; a context manager."""

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        variables = {**os.environ, "TERM": "xterm", **environment}
        variables.pop("COLUMNS", None)
        self.text, self.first_s = "", None
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=cwd, env=variables, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=_at_the_terminal,
        )  # fmt: skip
        os.close(slave)
        self.first_s: float | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, wait_s: float) -> bool:
        if not select.select([self._master], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's end of a pseudo-terminal
            return False
        self.text += data.decode(errors="replace")
        if self.first_s is None and "\n" in self.text:
            self.first_s = time.monotonic() - self.began_s
        return bool(data)

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Read until ``condition``; TimeoutError with the output if the command ends before."""
        until_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until_s or not self.read(0.02):
                raise TimeoutError(f"it did not happen within {limit_s:g} s:\n{self.text}")

    def wait(self, limit_s: float) -> int:
        """Read to the end; the exit status. TimeoutError with the output if that takes longer."""
        until_s = time.monotonic() + limit_s
        while self.read(0.1):
            if time.monotonic() > until_s:
                raise TimeoutError(f"it did not end within {limit_s:g} s:\n{self.text}")
        return self.process.wait(max(1.0, until_s - time.monotonic()))

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)


def _at_the_terminal() -> None:
    """Make this the terminal of the new process; restore Ctrl-C, which background shells ignore."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after ``text``: carriage return, cursor up, erasure."""
    lines, row, col = [""], 0, 0
    for token in _TOKEN.findall(text):
        if token == "\r":
            col = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row = max(0, row - int(re.sub(r"\D", "", token) or 1))
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:col].ljust(col) + token + lines[row][col + len(token) :]
            col += len(token)
    return [line.rstrip() for line in lines]


def lines_after(before: str, text: str) -> list[str]:
    """Non-empty lines on the screen of ``text`` that were not there at ``before``.

    A progress line that was redrawn with other seconds is old; a notice of Libra's in its place is
    new.
    """
    old = screen(before)
    new = screen(text)[len(old) - 1 :]
    redrawn = bool(old[-1]) and not new[0].startswith("libra:")
    return [line for line in new[redrawn:] if line]
