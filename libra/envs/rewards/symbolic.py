"""Answers compared as mathematics by the package math-verify: 1/2 equals 0.5, {1,2} equals {2,1}.

As in verl 0.9.1 (``math_verify.compute_score``), the truth is LaTeX in a box, and the completion
LaTeX or a plain expression.

Invariants
----------
1. A comparison takes at most ``timeout_s``. At the time-out its process is killed, and the next
   comparison gets a new process.
2. At most `MAX_PROCESSES` comparisons run at once on a worker; the wait for a process does not
   count towards ``timeout_s``.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from libra.errors import ConfigError, RewardFault, pip_install
from libra.untrusted import shown_line

logger = logging.getLogger(__name__)

MAX_PROCESSES = 4
_PROGRAM = Path(__file__).with_name("symbolic_process.py")
_places = threading.BoundedSemaphore(MAX_PROCESSES)
_idle: list[subprocess.Popen[bytes]] = []


def score(text: str, answer: str, *, timeout_s: float = 30.0, timeout_score: float = 0.0) -> float:
    """1.0 if ``text`` gives a value equal to ``answer``, else 0.0; ``timeout_score`` at the
    time-out. ConfigError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"reward math_verify: the package is not installed; type {pip_install('math')}")
    if not text:
        return 0.0
    with _places:
        process = _idle.pop() if _idle else _started()
        try:
            reply = _ask(process, json.dumps([text, answer]).encode() + b"\n", timeout_s)
        except BaseException:
            _end(process)
            raise
        if reply is None:
            _end(process)
            return timeout_score
        _idle.append(process)
    if "error" in reply:
        logger.info("math-verify failed, which scores 0: %s", shown_line(str(reply["error"])))
        return 0.0
    return float(reply["score"])


def _started() -> subprocess.Popen[bytes]:
    # -P: do not import from the directory of the program.
    return subprocess.Popen(
        [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> dict[str, Any] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    # The process reads a whole line before it writes anything, so this write ends.
    process.stdin.write(request)
    process.stdin.flush()
    reply = b""
    while not reply.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return None
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            raise RewardFault(f"reward math_verify: its process ended with exit code {process.wait()}")
        reply += part
    return dict(json.loads(reply))
