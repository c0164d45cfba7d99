"""One process that has imported what local workers import; Dask's nannies fork the workers from it
(`multiprocessing.forkserver`).

Workers import torch, transformers and Dask: seconds of each of two cores for every worker, and for
every worker that comes back. Here that happens once, beside the imports of the driver. Linux,
transformers' engine and machines without a GPU only; elsewhere, and with ``LIBRA_FORK_SERVER=0``,
every worker is a Python of its own.

Invariants
----------
1. Nothing happens in that process but imports: no thread, no tensor, no GPU, no random number.
2. A worker has the environment that it would have as a process of its own. What native libraries read once, when they are loaded,
   was the same when the fork server started; where it is not, workers are not forked.
3. No worker is forked with the state of another one's random numbers: `libra.cluster.forked` renews it.
4. Ctrl-C in a terminal reaches neither this process nor a worker (`libra.cluster.worker_process`).
5. A worker that ended comes back within seconds, and the others live on, whatever has become of this process: where it is gone,
   another one like it is started; where it gives no answer, the worker is a Python of its own. The kernel says that a worker ended.
"""

from __future__ import annotations

import glob
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.cluster.forked import OWN_PATH_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from libra.config import RunConfig

logger = logging.getLogger(__name__)

STDERR = 2

SWITCH = "LIBRA_FORK_SERVER"
GPU_FILES = ("/proc/driver/nvidia", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/accel*")
"""Files of the drivers of NVIDIA, AMD, Windows' Linux, and other accelerators. No process reaches a
GPU without one."""
PRELOAD = (
    "libra.cluster.forked",  # first: it gives the environment back
    "distributed.nanny",
    "libra.worker.runtime",
    "libra.graph.iteration",
    "libra.train.replica",
    "libra.rollout.transformers_engine",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
)
"""By name: this package must not know what its workers do."""
READ_ONCE = (
    *("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LD_", "CUDA_", "TORCH", "PYTORCH_", "HF_", "HOME"),
    *("TRANSFORMERS_", "TOKENIZERS_", "PYTHON", "XDG_", "LIBRA_MODELS"),
)  # fmt: skip
"""Beginnings of names of variables that a library reads when it is loaded or imported."""
ANSWER_S = 5.0
"""How long a worker waits for a fork server that is stopped, or that has answered before."""
IMPORTS_S = 120.0
"""How long it waits for one that imports."""
EXIT_CODE_S = 1.0
"""How long the exit code of a worker that has ended is waited for."""
_started_with: dict[str, str] | None = None
_answered_pid: int | None = None
_lock = threading.Lock()


def may_have_gpu() -> bool:
    """Whether this machine has a file of a GPU's driver (Linux). Without one torch finds none."""
    return any(glob.glob(pattern) for pattern in GPU_FILES)  # noqa: PTH207  of absolute paths


def begin(config: RunConfig, wanted: Mapping[str, str]) -> bool:
    """Start the process, which then imports; returns at once.

    Parameters
    ----------
    config : RunConfig
    wanted : mapping
        All variables of its workers, but for those of one worker (`libra.cluster.worker_process`).

    Returns
    -------
    bool
        Whether workers of this configuration and environment can be forked from it.
    """
    global _started_with
    if not _usable(config):
        return False
    if _started_with is not None and not _fits(_started_with, wanted):
        if multiprocessing.active_children():  # a cluster of other settings, whose workers are this process's children
            return False
        _stop()
        _started_with = None
    if _started_with is None:
        forkserver.set_forkserver_preload([*PRELOAD, *_model_modules(config)])
    with sigint_blocked(), _in_environment(wanted):
        forkserver.ensure_running()
    _started_with = _started_with or dict(wanted)
    return True


def take_over() -> None:
    """Make this process's workers of the method ``forkserver`` ours: `_started`, and no module that
    Dask adds to those imported."""
    import distributed.utils

    distributed.utils._forkserver_preload_set = True  # type: ignore[attr-defined]
    context.ForkServerProcess._Popen = staticmethod(_started)  # type: ignore[method-assign, assignment]


class _Forked(popen_forkserver.Popen):
    """A forked worker. That it ended is known by its process, and not by the fork server, which may
    be stopped or gone."""

    _ended: int | None = None

    def _launch(self, process_obj: Any) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        with suppress(OSError):  # it has ended, or the kernel is older than 5.3: the fork server says it
            self._ended = os.pidfd_open(self.pid)
            util.Finalize(self, os.close, (self._ended,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, 255 where nobody knows it; None while it lives."""
        if self.returncode is None and self._ended is not None:
            if not wait([self._ended], 0 if flag == os.WNOHANG else None):
                return None
            if not wait([self.sentinel], EXIT_CODE_S):
                self.returncode = 255
        return super().poll(flag)

    def wait(self, timeout: float | None = None) -> int | None:
        """As `poll`, after at most ``timeout`` seconds, by default until it ends."""
        if self.returncode is None and self._ended is not None and not wait([self._ended], timeout):
            return None
        return self.poll(0)


class _Leave:
    """Read by a process that the fork server forked to show that it answers, which ends there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (0,)


def _started(process: Any) -> Any:
    """A worker's process: forked, or a Python of its own where the fork server gives no answer
    (`multiprocessing`'s ``Popen``)."""
    for _ in range(2):
        try:
            _keep_running()
            if _answers():
                return _Forked(process)
            break
        except (OSError, EOFError):  # gone since
            continue
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    logger.warning(
        "the process that workers are forked from gives no answer: a worker is started without it, which takes some seconds more; "
        "if it is stopped, type kill -CONT %s",
        pid,
    )
    return popen_spawn_posix.Popen(process)


def _keep_running() -> None:
    """Start the fork server again if it has ended, as it was started."""
    with _lock:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            with sigint_blocked(), _in_environment(_started_with or os.environ):
                forkserver.ensure_running()


def _answers() -> bool:
    """Whether the fork server forks a process, which ends at once; OSError or EOFError if it has
    ended itself."""
    global _answered_pid
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    status, data = forkserver.connect_to_new_process([])
    try:
        os.write(data, pickle.dumps(_Leave()))
        begun_s = running_s = time.monotonic()
        while not wait([status], 0.2):
            now_s = time.monotonic()
            if _answered_pid != pid and not _is_stopped(pid):
                running_s = now_s
            if now_s - running_s > ANSWER_S or now_s - begun_s > IMPORTS_S:
                return False
        forkserver.read_signed(status)
    finally:
        os.close(status)
        os.close(data)
    _answered_pid = pid
    return True


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Within it, processes that this thread starts begin with SIGINT blocked: an interrupted import
    says so in a traceback."""
    _start_resource_tracker()  # which unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _usable(config: RunConfig) -> bool:
    return (
        sys.platform == "linux"
        and config.cluster.scheduler is None
        and config.rollout.engine == "transformers"
        and os.environ.get(SWITCH) != "0"
        and not may_have_gpu()
    )


def _fits(had: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a worker forked under ``had`` can be given the environment ``wanted``: nothing is too
    much, or was read too early."""
    return had.keys() <= wanted.keys() and all(
        had.get(name) == wanted[name] for name in wanted if name.startswith(READ_ONCE)
    )


def _model_modules(config: RunConfig) -> list[str]:
    """The module of transformers with the model's class, where that can be read from a directory."""
    from libra.config import resolve_model
    from libra.errors import ModelError

    try:
        kind = json.loads((Path(resolve_model(config.model.path)) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, ModelError):  # named when the model is checked
        return []
    return [f"transformers.models.{kind}.modeling_{kind}"] if isinstance(kind, str) and kind.isidentifier() else []


@contextmanager
def _in_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """This process's environment as the fork server shall have it, with the modules of this process
    first on its path."""
    before = dict(os.environ)
    own = {name: before.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    for name in before.keys() - wanted.keys():  # set since then
        del os.environ[name]
    os.environ.update({**wanted, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", OWN_PATH_VARIABLE: json.dumps(own)})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _start_resource_tracker() -> None:
    """Start multiprocessing's process that removes what a killed one left; what it warns of is no
    news for a terminal."""
    if getattr(resource_tracker._resource_tracker, "_fd", None) is not None:  # type: ignore[attr-defined]
        return
    with redirected(STDERR, Path(os.devnull)):
        resource_tracker.ensure_running()


def _stop() -> None:
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()


@contextmanager
def redirected(number: int, path: Path) -> Iterator[None]:
    """Within it, file descriptor ``number`` writes to the end of ``path``, also for processes that
    are started; OSError."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    kept = os.dup(number)
    os.dup2(opened, number)
    os.close(opened)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
