"""A process with imported modules, from which `multiprocessing` forks processes (Linux).

Every new or restarted worker would otherwise import torch, transformers and Dask, which takes
seconds of two cores.

Invariants
----------
1. The fork server only imports modules: no thread, no tensor, no GPU, no random number.
2. A forked process has the environment of a process of its own. Nothing is forked if the fork
   server started with other values of variables that native libraries read once.
3. No two forked processes start with the same state of random numbers.
4. Ctrl-C in a terminal does not reach the fork server.
5. If the fork server was killed, an equal one starts: ended processes come back, others live on.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

STDERR = 2
SWITCH = "LIBRA_FORK_SERVER"
OWN_PATH_VARIABLE = "LIBRA_FORK_PATH"
"""Variable with the forked processes' Python search path, as JSON; the fork server has another
path."""
READ_ONCE = (
    *("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LD_", "CUDA_", "TORCH", "PYTORCH_", "HF_", "HOME"),
    *("TRANSFORMERS_", "TOKENIZERS_", "PYTHON", "XDG_", "LIBRA_MODELS"),
)  # fmt: skip
"""Prefixes of variables that a library reads only when it is loaded or imported."""
EXIT_CODE_S = 1.0
"""Seconds to wait for the exit code of a process that has ended."""
_started_with: dict[str, str] | None = None
_lock = threading.Lock()


def begin(modules: Sequence[str], wanted: Mapping[str, str]) -> bool:
    """Start the fork server, which imports ``modules``; returns at once whether forking is
    possible. ``wanted`` has all environment variables of the processes."""
    global _started_with
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return False
    if _started_with is not None and not _fits(_started_with, wanted):
        if multiprocessing.active_children():  # a cluster of other settings, whose workers are this process's children
            return False
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _started_with = None
    if _started_with is None:
        forkserver.set_forkserver_preload([__name__, *modules])  # this one first: it restores the environment
        _started_with = dict(wanted)
    _ensure_running()
    return True


def take_over() -> None:
    """Fork this process's ``forkserver`` children from `begin`'s server, without Dask's modules."""
    import distributed.utils

    distributed.utils._forkserver_preload_set = True  # type: ignore[attr-defined]
    context.ForkServerProcess._Popen = staticmethod(_started)  # type: ignore[method-assign, assignment]


class _Forked(popen_forkserver.Popen):
    """A forked process whose end the kernel reports, because the fork server may be gone."""

    sentinel: int
    _status: int | None = None

    def _launch(self, process_obj: Any) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        with suppress(OSError):  # it has ended, or the kernel is older than 5.3: the fork server reports it
            ended = os.pidfd_open(self.pid)
            util.Finalize(self, os.close, (ended,))
            self._status, self.sentinel = self.sentinel, ended

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, 255 if it is unknown; None while the process lives."""
        if self.returncode is None and self._status is not None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            self.sentinel, self._status = self._status, None
            if not wait([self.sentinel], EXIT_CODE_S):
                self.returncode = 255
        return super().poll(flag)


def _started(process: Any) -> Any:
    _ensure_running()
    return _Forked(process)


def _ensure_running() -> None:
    with _lock:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            with sigint_blocked(), _in_environment(_started_with or os.environ):
                forkserver.ensure_running()


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT in processes that this thread starts: interrupted imports print tracebacks."""
    if getattr(resource_tracker._resource_tracker, "_fd", None) is None:  # type: ignore[attr-defined]
        with redirected(STDERR, Path(os.devnull)):  # it warns of files that a killed process left
            resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def append_to(number: int, path: Path) -> None:
    """Make file descriptor ``number`` append to ``path``, also in child processes; OSError."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(opened, number)
    os.close(opened)


@contextmanager
def redirected(number: int, path: Path) -> Iterator[None]:
    """`append_to` for the duration of the context."""
    kept = os.dup(number)
    try:
        append_to(number, path)
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _fits(had: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a process forked under ``had`` can get the environment ``wanted``."""
    return had.keys() <= wanted.keys() and all(
        had.get(name) == wanted[name] for name in wanted if name.startswith(READ_ONCE)
    )


@contextmanager
def _in_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """The fork server's environment within the context, with this process's ``sys.path``."""
    before = dict(os.environ)
    own = {name: wanted.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    given = {**wanted, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", OWN_PATH_VARIABLE: json.dumps(own)}
    try:
        _set_environment(given)
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str | None]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


# ---------------------------------------------------------------- in the fork server


def _become_server() -> None:
    """Restore the environment and freeze imported objects before forks, to keep memory shared."""
    server, own = os.getpid(), json.loads(os.environ.pop(OWN_PATH_VARIABLE))
    _set_environment({**os.environ, **own})
    gc.disable()  # a tenth of the time of these imports

    def freeze() -> None:
        if os.getpid() == server:
            gc.freeze()

    def renew() -> None:
        """Seed numpy anew, because siblings would share its state; Python reseeds itself."""
        if os.getppid() == server:
            gc.enable()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()

    os.register_at_fork(before=freeze, after_in_child=renew)


if OWN_PATH_VARIABLE in os.environ:
    _become_server()
