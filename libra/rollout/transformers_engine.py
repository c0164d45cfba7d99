"""The embedded engine: a stock transformers model, continuously batched over slots, on one thread of its own.

Callers are coroutines of any event loop. What they ask goes into one mailbox; the thread empties it between two steps, so
everything that happens to the batch happens in one order, on one thread. Answers go back in one call per loop and step.

Invariants
1. Only the engine's thread touches model and batch. Others put into the mailbox and read ``version`` and ``stats``.
2. Every future handed out is resolved exactly once: with a result, or an error; on ``close`` with EngineError.
3. A fault inside a step fails the requests in the engine, drops all KV, and nothing else: the thread lives on.
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
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import EngineError, LibraError
from libra.rollout import kv_slots as slot_cache
from libra.rollout.engine import EngineStats
from libra.rollout.engine_capacity import kv_token_bytes, tokens_within
from libra.rollout.slot_batch import Job, SlotBatch
from libra.rollout.weight_loading import load_causal_lm
from libra.tensors import compute_device
from libra.types import EngineCapacity, TurnOutput, TurnRequest

logger = logging.getLogger(__name__)

Reply = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class TransformersEngine:
    """Continuous batching of a Hugging Face causal LM (Llama, Qwen2, Qwen3 and their like) on this process's CPU or GPU.

    Parameters
    ----------
    model_dir : Path
        Directory in Hugging Face layout.
    slots : int
        Requests that generate at once. Their KV takes layers * 2 * slots * KV heads * longest context * head size
        numbers, grown as contexts grow.
    max_context_tokens : int
        Context plus generated tokens of one request, at most.
    dtype : {"float32", "bfloat16"}
    threads : int or None
        torch threads of the engine's thread; None leaves torch's own choice.
    version : int
        Number of the weights in ``model_dir``.
    exact_logprobs : bool
        Record log-probabilities that each piece of a turn has when it is scored alone, uncached (`libra.scoring`), in place
        of those that the batch drew it from: a forward pass more per turn.
    kv_cache_gib : float or None
        Most KV that it holds, in GiB; None: what all slots need at full length. With less, requests wait until theirs fits with
        all that they may generate, and what is retained between turns makes way.
    min_pass_s : float
        Seconds that each forward pass takes at least: the rest is waited out. For measurements that need engines of different
        speeds on one machine.
    device : {"auto", "cpu", "cuda"}
        `libra.tensors.compute_device`. On a GPU ``close`` gives its memory back to the driver.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        slots: int,
        max_context_tokens: int,
        dtype: str = "float32",
        threads: int | None = None,
        version: int = 0,
        exact_logprobs: bool = False,
        kv_cache_gib: float | None = None,
        min_pass_s: float = 0.0,
        device: str = "cpu",
    ) -> None:
        if slots < 1 or max_context_tokens < 2:
            raise EngineError(
                f"engine: got slots={slots}, max_context_tokens={max_context_tokens}; allowed: at least 1 and 2"
            )
        self.model_dir, self.slots, self.max_context_tokens = Path(model_dir), slots, max_context_tokens
        self.dtype, self.threads, self.version = dtype, threads, version
        self.exact_logprobs, self.kv_cache_gib, self.min_pass_s = exact_logprobs, kv_cache_gib, min_pass_s
        self.device = device
        self._batch: SlotBatch | None = None
        self._mailbox: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Reply | None]] = queue.SimpleQueue()
        self._replies: dict[int, Reply] = {}  # by ticket; the engine's thread only
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        self._tickets = itertools.count()
        self._thread: threading.Thread | None = None
        self._paused = self._closing = self._ended = False

    # -- what callers use --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model on a new thread; ModelError where it cannot be served."""
        if self._thread is not None:
            raise EngineError(f"{self.model_dir}: this engine was started before; make a new one")
        loaded = self._future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="libra-engine", daemon=True)
        self._thread.start()
        await loaded[1]

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn. Cancelling the awaiting task aborts it."""
        self._open().check(request)
        job, reply = Job(next(self._tickets), request, time.perf_counter()), self._future()
        self._post(self._submit, (job, reply), reply)
        try:
            return await reply[1]
        except asyncio.CancelledError:
            self._mailbox.put((self._abort, (request.trajectory_id, job.ticket), None))
            raise

    async def abort(self, trajectory_id: str) -> None:
        """End the trajectory's request with StopReason.ABORT, if it has one, and free its KV."""
        await self._ask(self._abort, trajectory_id, None)

    def forget(self, trajectory_id: str) -> None:
        """Free the KV kept for a trajectory; where it has a request running, when that ends."""
        self._mailbox.put((self._open().forget, (trajectory_id,), None))

    async def pause(self) -> None:
        """Stop before the next step."""
        await self._ask(self._set_paused, True)

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._ask(self._set_paused, False)

    async def load_version(self, version: int, directory: Path) -> None:
        """Serve ``directory/model.safetensors`` as ``version`` from the next token on; see RolloutEngine."""
        await self._ask(self._load, version, Path(directory))

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probabilities of tokens 1 to T - 1, prefilled through the pass that serves; see RolloutEngine."""
        return cast("NDArray[np.float32]", await self._ask(self._open().score, token_ids))

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Random projections of every layer as used; see RolloutEngine."""
        return cast("dict[str, tuple[float, ...]]", await self._ask(self._open().project, seed))

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Columns of layers as used; see ReadsColumns."""
        return cast("dict[str, NDArray[np.float32]]", await self._ask(self._open().columns, wanted))

    def stats(self) -> EngineStats:
        """Counters as of about now (the engine's thread may be in the middle of a step)."""
        return self._open().stats()

    def capacity(self) -> EngineCapacity:
        """What it holds, and the seconds of its last passes."""
        batch = self._open()
        token_bytes = self._token_bytes
        return EngineCapacity(
            kv_tokens=batch.kv_tokens, kv_bytes=batch.kv_tokens * token_bytes, kv_token_bytes=token_bytes,
            slots=self.slots, tp=1, steps=batch.meter.seconds(), max_context_tokens=self.max_context_tokens,
        )  # fmt: skip

    async def close(self) -> None:
        """Fail what is pending and join the thread; may be called twice."""
        if self._thread is None:
            return
        self._closing = True
        self._mailbox.put((lambda: None, (), None))
        await asyncio.to_thread(self._thread.join)
        self._batch = None
        if torch.cuda.is_initialized():
            gc.collect()  # the model's modules know each other in circles
            torch.cuda.empty_cache()

    def _open(self) -> SlotBatch:
        if self._batch is None or self._closing:
            raise EngineError(f"{self.model_dir}: the engine is {'closed' if self._closing else 'not started'}")
        return self._batch

    def _future(self) -> Reply:
        loop = asyncio.get_running_loop()
        return loop, loop.create_future()

    async def _ask(self, action: Callable[..., Any], *arguments: Any) -> Any:
        self._open()
        reply = self._future()
        self._post(action, arguments, reply)
        return await reply[1]

    def _post(self, action: Callable[..., Any], arguments: tuple[Any, ...], reply: Reply) -> None:
        """Put a question into the mailbox. Checked afterwards, so that none is left in a box nobody empties."""
        self._mailbox.put((action, arguments, reply))
        if self._ended:
            raise EngineError(f"{self.model_dir}: the engine is closed")

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self, loaded: Reply) -> None:
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            slot_cache.register()
            model = load_causal_lm(self.model_dir, self.dtype, slot_cache.SLOT_ATTENTION)
            self._token_bytes = kv_token_bytes(model.config.to_dict(), self.dtype)
            budget = self.kv_cache_gib
            model.to(compute_device(self.device))
            batch = SlotBatch(
                model,
                slots=self.slots,
                max_context_tokens=self.max_context_tokens,
                version=self.version,
                exact_logprobs=self.exact_logprobs,
                kv_tokens=None if budget is None else tokens_within(budget, self._token_bytes, self.max_context_tokens),
                min_pass_s=self.min_pass_s,
            )
        except Exception as error:  # noqa: BLE001  the boundary of the thread: start() raises it
            self._answer(loaded, error)
            self._deliver()
            return
        self._batch = batch
        self._answer(loaded, None)
        while not self._closing:
            self._deliver()
            idle = self._paused or not batch.has_work
            while idle or not self._mailbox.empty():
                self._handle(*self._mailbox.get())
                idle = False
            if self._paused or self._closing:
                continue
            try:
                for job, output in batch.step():
                    self._answer(self._replies.pop(job.ticket), output)
            except Exception as error:  # noqa: BLE001  the boundary of a step: callers get it, chained
                self._fail(batch.drop_all(), f"step {batch.steps} failed: {error}", error)
        self._ended = True
        self._fail(batch.drop_all(), "the engine was closed", None)
        while not self._mailbox.empty():
            _, _, reply = self._mailbox.get()
            if reply is not None:
                self._answer(reply, EngineError(f"{self.model_dir}: the engine was closed"))
        self._deliver()

    def _handle(self, action: Callable[..., Any], arguments: tuple[Any, ...], reply: Reply | None) -> None:
        try:
            result = action(*arguments)
        except Exception as error:  # noqa: BLE001  the boundary of a request: whoever asked gets it
            failure: Exception = error
            if not isinstance(error, LibraError):
                failure = EngineError(f"{self.model_dir}: {error}")
                failure.__cause__ = error
            if reply is not None:
                self._answer(reply, failure)
            return
        if reply is not None and action != self._submit:
            self._answer(reply, result)

    def _submit(self, job: Job, reply: Reply) -> None:
        self._open().submit(job)
        self._replies[job.ticket] = reply

    def _abort(self, trajectory_id: str, ticket: int | None) -> None:
        ended = self._open().abort(trajectory_id, ticket)
        if ended is not None:
            self._answer(self._replies.pop(ended[0].ticket), ended[1])

    def _load(self, version: int, directory: Path) -> None:
        begun_s = time.perf_counter()
        self._open().load(version, directory)
        self.version = version
        logger.info("weights announced: now serving version %d (%.3f s)", version, time.perf_counter() - begun_s)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _fail(self, jobs: list[Job], reason: str, cause: Exception | None) -> None:
        if cause is not None:
            logger.error("%s; %d requests fail, the engine goes on", reason, len(jobs), exc_info=cause)
        for job in jobs:
            failure = EngineError(f"{job.request.trajectory_id}: {reason}")
            failure.__cause__ = cause
            self._answer(self._replies.pop(job.ticket), failure)

    def _answer(self, reply: Reply, result: Any) -> None:
        self._outbox.setdefault(reply[0], []).append((reply[1], result))

    def _deliver(self) -> None:
        for loop, answers in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers)
            except RuntimeError:  # that loop is closed, so nobody waits there any more
                logger.warning("an event loop closed with %d answers on their way to it", len(answers))
        self._outbox.clear()


def _resolve(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Runs in the callers' loop; a future may have been cancelled meanwhile."""
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
