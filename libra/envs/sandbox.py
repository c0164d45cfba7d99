"""Runs a Python program in a process of its own, with limits on time, memory, files and processes.

Invariants
----------
1. `run_program` returns within ``timeout_s`` plus the time to kill, and leaves no process of the program's session
   behind.
2. The program sees an empty environment, an empty working directory that is removed afterwards, and no third-party
   packages.
3. At most ``output_chars`` characters of its output are read, however many it writes.

What this does NOT restrict: it is a guard against mistakes and greed of a model in training, not against an attacker.
The program can read every file its user may read, and can write to what its user may write outside the working
directory (up to the file-size limit). It has no network only where the kernel lets a process make a user namespace
(`Finished.isolated` says whether it did). A program that starts a new session escapes the final kill where the
process limit does not stop it, and that limit does not bind root. For hostile code, run the tool workers themselves
in a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 2**20

# Limits are set by the child on itself, before any of the program runs: a preexec_fn is unsafe in a process with
# threads.
_BOOTSTRAP = """
import ctypes, os, resource, sys
cpu_s, memory_bytes, file_bytes, status = map(int, sys.argv[1:])
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
try:
    isolated = ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK) == 0
except (OSError, AttributeError):
    isolated = False
for limit, value in (
    (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32),
):
    resource.setrlimit(limit, (value, value))
os.write(status, b"1" if isolated else b"0")
os.close(status)
source = sys.stdin.read()
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes
    ----------
    exit_code : int or None
        Negative where a signal ended it, None where it was cut off at ``timeout_s``.
    output : str
        Standard output and error together, the first ``output_chars`` characters.
    isolated : bool
        Whether the program had no network.
    """

    exit_code: int | None
    output: str
    isolated: bool


def run_program(
    source: str,
    *,
    timeout_s: float = 5.0,
    memory_bytes: int = 512 * MEGABYTE,
    file_bytes: int = MEGABYTE,
    output_chars: int = 20_000,
) -> Finished:
    """Runs ``source`` as ``__main__`` under ``-I`` (isolated mode). CPU seconds are limited to ``timeout_s`` rounded
    up, plus 1.

    Raises
    ------
    OSError
        Where the process cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="libra-", ignore_cleanup_errors=True) as folder:
        output_path, status_path = Path(folder, "output"), Path(folder, "status")
        work = Path(folder, "work")
        work.mkdir()
        with output_path.open("wb") as output, status_path.open("wb") as status:
            limits = (int(timeout_s) + 2, memory_bytes, file_bytes, status.fileno())
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-u", "-c", _BOOTSTRAP, *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=work,
                env={},
                pass_fds=(status.fileno(),),
                start_new_session=True,
            )
        exit_code: int | None
        try:
            process.communicate(source.encode("utf-8", "replace"), timeout=timeout_s)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _kill_session(process)
        with output_path.open(encoding="utf-8", errors="replace") as text:
            return Finished(exit_code, text.read(output_chars), status_path.read_bytes() == b"1")


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the program's process group, and reaps the program."""
    with contextlib.suppress(ProcessLookupError):  # then nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
