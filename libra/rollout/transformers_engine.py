"""The embedded engine: a stock transformers model, batched over slots on a thread of its own.

Callers are coroutines of any event loop. Their requests go into one mailbox, which the thread
empties between two steps.

1. Only the engine's thread touches model and batch. Other threads use the mailbox and read
   ``version`` and ``stats``.
2. Every future is resolved exactly once: with a result, or an error; on ``close`` with EngineError.
3. A fault inside a step fails the requests in the engine and drops all KV; the thread continues.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import EngineError, LibraError
from libra.rollout import attention
from libra.rollout.capacity import GIB, kv_token_bytes, tokens_within, with_usual_names
from libra.rollout.engine import EngineSettings, EngineStats
from libra.rollout.kv_objects import HostKV, KVObject
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm
from libra.tensors import compute_device
from libra.types import EngineCapacity, TurnOutput, TurnRequest

logger = logging.getLogger(__name__)

Reply = Future[Any]


@dataclass(frozen=True, slots=True)
class TransformersSettings(EngineSettings):
    """Settings of a `TransformersEngine`. With ``kv_cache_gib``, a request waits until its context
    and all tokens that it may generate fit; contexts retained between turns are evicted for it."""

    exact_logprobs: bool = False  # score turns alone and uncached (`libra.heads`): one more pass per turn
    min_pass_s: float = 0.0  # for measurements that need engines of different speeds
    device: str = "cpu"  # "auto", "cpu", "cuda": `libra.tensors.compute_device`
    loader: str | None = None  # ``model.loader``
    speculate: bool = False  # `libra.rollout.speculation`
    host_kv_gib: float | None = None  # host memory for evicted or imported KV (`libra.rollout.kv_objects`)
    record_routes: bool = False  # experts of each token (`libra.experts`); not with ``host_kv_gib``


class TransformersEngine:
    """Continuous batching of a Hugging Face causal LM on this process's CPU or GPU. ``version`` is
    the number of the weights in ``model_dir``; ``options`` are fields of `TransformersSettings`."""

    continues_turns = True

    def __init__(self, model_dir: Path | str, *, version: int = 0, **options: Any) -> None:
        self.settings = TransformersSettings(model_dir=Path(model_dir), **options)
        self.version = version
        gib = self.settings.host_kv_gib
        self._host_kv = None if gib is None else HostKV(int(gib * GIB))
        self._batch: SlotBatch | None = None
        self._mailbox: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Reply | None]] = queue.SimpleQueue()
        self._replies: dict[int, Reply] = {}  # by ticket; the engine's thread only
        self._tickets = itertools.count()
        self._thread: threading.Thread | None = None
        self._paused = self._closing = self._ended = False

    async def start(self) -> None:
        """Load the model on a new thread; ModelError if it cannot be served."""
        if self._thread is not None:
            raise EngineError(f"{self.settings.model_dir}: this engine was started before; create a new one")
        loaded = Reply()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="libra-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(loaded)

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn. Cancelling the awaiting task aborts it."""
        self._open().check(request)
        job, reply = Job(next(self._tickets), request, time.perf_counter()), Reply()
        self._post(self._submit, (job, reply), reply)
        try:
            return cast("TurnOutput", await asyncio.wrap_future(reply))
        except asyncio.CancelledError:
            self._mailbox.put((self._abort, (request.trajectory_id, job.ticket), None))
            raise

    async def abort(self, trajectory_id: str) -> None:
        await self._ask(self._abort, trajectory_id, None)

    def forget(self, trajectory_id: str) -> None:
        self._mailbox.put((self._open().forget, (trajectory_id,), None))

    async def pause(self) -> None:
        """Stop before the next step."""
        await self._ask(self._set_paused, True)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._ask(self._set_paused, False)

    async def load_version(self, version: int, directory: Path) -> None:
        await self._ask(self._load, version, Path(directory))

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return cast("NDArray[np.float32]", await self._ask(self._open().score, token_ids))

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """See RolloutEngine. Runs beside the engine's thread, but not during a load."""
        return await asyncio.to_thread(self._open().forward.project, seed)

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """See ReadsColumns. Runs beside the engine's thread, but not during a load."""
        return await asyncio.to_thread(self._open().forward.columns, wanted)

    async def export_kv(self, trajectory_id: str) -> KVObject | None:
        if self._closing and self._host_kv is not None:
            return self._host_kv.get(trajectory_id)
        return cast("KVObject | None", await self._ask(self._open().export_kv, trajectory_id))

    async def park_kv(self) -> None:
        await self._ask(self._open().park_kv)

    async def import_kv(self, kv: KVObject) -> bool:
        return self._host_kv is not None and await self._ask(self._host_kv.put, kv)

    def stats(self) -> EngineStats:
        """Approximate counters (the engine's thread may be in the middle of a step)."""
        return self._open().stats()

    def capacity(self) -> EngineCapacity:
        batch = self._open()
        token_bytes = self._token_bytes
        return EngineCapacity(
            kv_tokens=batch.kv_tokens, kv_bytes=batch.kv_tokens * token_bytes, kv_token_bytes=token_bytes,
            slots=self.settings.slots, tp=1, steps=batch.meter.seconds(),
            max_context_tokens=self.settings.max_context_tokens, exchanges_kv=self._host_kv is not None,
        )  # fmt: skip

    async def close(self) -> None:
        """Fail pending requests and join the thread; may be called twice."""
        if self._thread is None:
            return
        self._closing = True
        self._mailbox.put((lambda: None, (), None))
        await asyncio.to_thread(self._thread.join)
        self._batch = None
        if torch.cuda.is_initialized():
            gc.collect()  # the model's modules refer to each other in cycles
            torch.cuda.empty_cache()

    def _open(self) -> SlotBatch:
        if self._batch is None or self._closing:
            state = "closed" if self._closing else "not started"
            raise EngineError(f"{self.settings.model_dir}: the engine is {state}")
        return self._batch

    async def _ask(self, action: Callable[..., Any], *arguments: Any) -> Any:
        self._open()
        reply = Reply()
        self._post(action, arguments, reply)
        return await asyncio.wrap_future(reply)

    def _post(self, action: Callable[..., Any], arguments: tuple[Any, ...], reply: Reply) -> None:
        self._mailbox.put((action, arguments, reply))
        if self._ended:  # nothing empties the mailbox
            raise EngineError(f"{self.settings.model_dir}: the engine is closed")

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _run(self, loaded: Reply) -> None:
        settings = self.settings
        try:
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            attention.register()
            model = load_causal_lm(settings.model_dir, settings.dtype, attention.SLOT_ATTENTION, settings.loader)
            self._token_bytes = kv_token_bytes(with_usual_names(model.config.to_dict()), settings.dtype)
            model.to(compute_device(settings.device))
            kv_tokens = None
            if settings.kv_cache_gib is not None:
                kv_tokens = tokens_within(settings.kv_cache_gib, self._token_bytes, settings.max_context_tokens)
            same = ("slots", "max_context_tokens", "exact_logprobs", "min_pass_s", "speculate", "record_routes")
            options = {name: getattr(settings, name) for name in same}
            batch = SlotBatch(model, version=self.version, kv_tokens=kv_tokens, host_kv=self._host_kv, **options)
        except Exception as error:  # noqa: BLE001  the boundary of the thread: start() raises it
            _answer(loaded, error)
            return
        self._batch = batch
        _answer(loaded, None)
        while not self._closing:
            idle = self._paused or not batch.has_work
            while idle or not self._mailbox.empty():
                self._handle(*self._mailbox.get())
                idle = False
            if self._paused or self._closing:
                continue
            try:
                for job, output in batch.step():
                    _answer(self._replies.pop(job.ticket), output)
            except Exception as error:  # noqa: BLE001  the boundary of a step: callers get it, chained
                self._fail(batch.drop_all(), f"step {batch.counters.steps} failed: {error}", error)
        self._ended = True
        self._fail(batch.drop_all(), "the engine was closed", None)
        while not self._mailbox.empty():
            _, _, reply = self._mailbox.get()
            if reply is not None:
                _answer(reply, EngineError(f"{self.settings.model_dir}: the engine was closed"))

    def _handle(self, action: Callable[..., Any], arguments: tuple[Any, ...], reply: Reply | None) -> None:
        try:
            result = action(*arguments)
        except Exception as error:  # noqa: BLE001  the boundary of a request: the caller gets it
            failure: Exception = error
            if not isinstance(error, LibraError):
                failure = EngineError(f"{self.settings.model_dir}: {error}")
                failure.__cause__ = error
            if reply is not None:
                _answer(reply, failure)
            return
        if reply is not None and action != self._submit:
            _answer(reply, result)

    def _submit(self, job: Job, reply: Reply) -> None:
        self._open().submit(job)
        self._replies[job.ticket] = reply

    def _abort(self, trajectory_id: str, ticket: int | None) -> None:
        ended = self._open().abort(trajectory_id, ticket)
        if ended is not None:
            _answer(self._replies.pop(ended[0].ticket), ended[1])

    def _load(self, version: int, directory: Path) -> None:
        begun_s = time.perf_counter()
        self._open().load(version, directory)
        self.version = version
        logger.info("weights announced: now serving version %d (%.3f s)", version, time.perf_counter() - begun_s)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _fail(self, jobs: list[Job], reason: str, cause: Exception | None) -> None:
        if cause is not None:
            logger.error("%s; %d requests fail, the engine continues", reason, len(jobs), exc_info=cause)
        for job in jobs:
            failure = EngineError(f"{job.request.trajectory_id}: {reason}")
            failure.__cause__ = cause
            _answer(self._replies.pop(job.ticket), failure)


def _answer(reply: Reply, result: Any) -> None:
    if not reply.set_running_or_notify_cancel():  # the caller no longer waits
        return
    if isinstance(result, Exception):
        reply.set_exception(result)
    else:
        reply.set_result(result)
