"""One process per worker that has imported vLLM, from which engine processes are forked (`multiprocessing.forkserver`).

A Python of its own imports vLLM for ten seconds and more of a core, at every start, restart and change of degree. Here the
first start imports it once, and later ones fork. Linux and CPUs only (what forks must not have touched a GPU); elsewhere, and with
``LIBRA_FORK_SERVER=0``, vLLM starts engine processes as it does itself.

Invariants
1. Nothing happens in that process but imports. It has no thread, and no memory of a model.
2. An engine process has the environment of this process at its start, and as many threads as that says. What is read when vLLM is
   imported (`READ_ONCE`) was the same when the fork server started; where it is not, the engine process is a Python of its own.
3. The fork server ends with this process, and engine processes end with the fork server (`libra.rollout.vllm_scheduler`): so the
   write end of the pipe that keeps it alive is closed in each of them. Ranks are forked by the engine process, and end with it.
4. A fork server that ended, or gives no answer, is replaced once, then left out. One that gives no answer is ended, and the
   engines with it, which are then replaced as those that died.
"""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix, process, reduction, spawn, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from libra.rollout.vllm_settings import PARENT, read_model_config

logger = logging.getLogger(__name__)

SWITCH = "LIBRA_FORK_SERVER"
PRELOAD = (
    "libra.rollout.vllm_fork_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank",
    "setproctitle",
    "libra.rollout.vllm_coupled",
    "libra.rollout.vllm_scheduler",
    "libra.rollout.vllm_worker",
)
READ_ONCE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "TORCHDYNAMO_DISABLE", "VLLM_LOGGING_LEVEL", "HF_HOME")
"""Variables that are read when vLLM is imported, and may differ between the engines of a worker."""
IMPORTS_S, ANSWER_S = 300.0, 60.0
"""How long an engine process waits for a fork server that imports, and for one that has answered before."""


class _Server(forkserver.ForkServer):
    """The fork server of this process."""

    read_once: tuple[str | None, ...] | None = None
    answered: int | None = None

    def fits(self) -> bool:
        """Whether an engine process with the present environment can be forked from it."""
        now = tuple(map(os.environ.get, READ_ONCE))
        if self.pid is None:
            self.read_once = now
        return self.read_once == now

    @property
    def pid(self) -> int | None:
        """Its process; None before it was started."""
        pid: int | None = vars(self)["_forkserver_pid"]
        return pid


_server = _Server()


class _Forked(popen_forkserver.Popen):
    """An engine process. TimeoutError if the fork server did not make it, which is then gone."""

    def _launch(self, process_obj: Any) -> None:
        data = spawn.get_preparation_data(process_obj._name)
        for name in ("init_main_from_name", "init_main_from_path"):  # an engine needs nothing of a user's script
            data.pop(name, None)
        _server.ensure_running()
        _wrap(process_obj, {**os.environ, PARENT: str(_server.pid)})
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(data, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, to_child = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(to_child), self.sentinel))  # type: ignore[attr-defined]
        with open(to_child, "wb") as file:  # noqa: PTH123  of a descriptor
            file.write(buffer.getbuffer())
        if not wait([self.sentinel], ANSWER_S if _server.answered == _server.pid else IMPORTS_S):
            with suppress(ProcessLookupError):
                os.kill(_server.pid or 0, signal.SIGKILL)
            raise TimeoutError(f"process {_server.pid}, from which engine processes are forked, gave no answer")
        self.pid = forkserver.read_signed(self.sentinel)
        _server.answered = _server.pid


def _wrap(process_obj: Any, environment: Mapping[str, str]) -> None:
    """Let a process begin with `_as_child`; it may have been wrapped for a fork server that is gone."""
    target, args, kwargs = process_obj._target, process_obj._args, process_obj._kwargs
    if target is _as_child:
        _, target, args, kwargs = args
    process_obj._target, process_obj._args, process_obj._kwargs = _as_child, (environment, target, args, kwargs), {}


def _as_child(
    environment: Mapping[str, str], target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """What an engine process does first; see the invariants."""
    import torch

    gc.freeze()  # a collection would copy the pages of everything that was imported
    inherited: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if inherited._forkserver_alive_fd is not None:
        os.close(inherited._forkserver_alive_fd)
        inherited._forkserver_alive_fd = None
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    with _context_of_vllm(lambda: multiprocessing.get_context("fork")):
        target(*args, **kwargs)


def _start(process_obj: Any) -> Any:
    """Start an engine process: forked, or as a Python of its own."""
    if _server.fits():
        for _ in range(2):
            try:
                return _Forked(process_obj)
            except (OSError, EOFError) as error:  # a timeout is one, and so is a server that has ended since
                logger.warning("an engine process could not be forked: %s", error)
    if process_obj._target is _as_child:
        _, process_obj._target, process_obj._args, process_obj._kwargs = process_obj._args
    return popen_spawn_posix.Popen(process_obj)


class _EngineProcess(context.SpawnProcess):
    """What vLLM makes and starts."""

    _Popen = staticmethod(_start)  # type: ignore[assignment]


class _Context:
    """multiprocessing's context ``spawn``, with other processes."""

    Process = _EngineProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing.get_context("spawn"), name)


@contextmanager
def forked(model_dir: Path, *, on_cpu: bool) -> Iterator[None]:
    """Within it vLLM's engine processes are forked, where they can be. One thread at a time."""
    if not on_cpu or sys.platform != "linux" or os.environ.get(SWITCH) == "0" or process.current_process().daemon:
        yield
        return
    if _server.pid is None:
        _server.set_forkserver_preload([*PRELOAD, *_model_module(model_dir)])
    with _context_of_vllm(_Context):
        yield


@contextmanager
def _context_of_vllm(make: Callable[[], Any]) -> Iterator[None]:
    """vLLM gets its multiprocessing contexts from ``make``."""
    from vllm.utils import system_utils
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    modules: tuple[Any, ...] = (system_utils, utils, multiproc_executor)
    before = [module.get_mp_context for module in modules]
    for module in modules:
        module.get_mp_context = make
    try:
        yield
    finally:
        for module, found in zip(modules, before, strict=True):
            module.get_mp_context = found


def _model_module(model_dir: Path) -> list[str]:
    """vLLM's module with the model's class, if it has one."""
    from vllm.model_executor.models import ModelRegistry

    names = read_model_config(model_dir).get("architectures") or [""]
    module = getattr(ModelRegistry.models.get(names[0]), "module_name", None)
    return [module] if isinstance(module, str) else []
