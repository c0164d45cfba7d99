"""The vLLM engine: an AsyncLLM and its process, fed from an event loop on a thread of its own.

Callers are coroutines of any event loop; their requests run in the engine's loop, in one order.

Invariants
1. Every ``generate`` ends once: with its output, or with EngineError; a process that dies fails all its requests.
2. A process that died is replaced before the next request is served, with the weights it had.
3. Requests wait here, in order of priority and arrival, until one of ``slots`` is free: vLLM never has more. So no request
   that has started is preempted, not even when an update makes vLLM compute it again.
4. Between ``pause`` and ``resume``, and while weights are loaded, no request takes a step; probes do (`vllm_scheduler`).
5. A version is served completely or not at all: a file that does not fit is refused before anything changes; if loading
   fails half way, the previous weights are loaded again, or the process is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from libra.errors import EngineError, LibraError, WeightsError
from libra.rollout.draft_length import DraftedByRows
from libra.rollout.engine import EngineCounters, EngineStats
from libra.rollout.engine_capacity import PassMeter, kv_token_bytes
from libra.rollout.kv_object import KVObject
from libra.rollout.request_checks import check_request, packed_priority
from libra.rollout.request_queue import RequestQueue
from libra.rollout.vllm_kv_files import VLLMKv
from libra.rollout.vllm_process import Core, EngineGone, VLLMJob
from libra.rollout.vllm_settings import VLLMSettings, check_installed, max_model_tokens, read_model_config
from libra.rollout.weight_loading import HEAD, ExpectedWeights
from libra.types import EngineCapacity, StopReason, TurnOutput, TurnRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""


class VLLMEngine:
    """Continuous batching by vLLM, in a process of its own per engine (and one per tensor-parallel rank).

    Parameters
    ----------
    model_dir : Path
        Directory in Hugging Face layout, with safetensors.
    slots, max_context_tokens, dtype, threads
        As of `TransformersEngine`; ``threads`` per rank.
    version : int
        Number of the weights in ``model_dir``.
    options
        Further fields of `VLLMSettings`: tp, keep_kv, kv_cache_gib, gpu_memory_frac, eager, speculate.
    """

    continues_turns = True

    def __init__(self, model_dir: Path | str, *, version: int = 0, **options: Any) -> None:
        self.settings = VLLMSettings(model_dir=Path(model_dir), **options)
        self.version = version
        self.restarts = 0
        self._first_version = version
        self._directory: Path | None = None  # of the version in use, None if it is model_dir's
        self._core: Core | None = None
        self._queue: RequestQueue[VLLMJob] = RequestQueue(self.settings.slots)
        self._tickets = itertools.count()
        self._paused = self._held = self._closing = self._ended = False
        self._entry = threading.Lock()  # between callers and the end of the loop
        self._lock = asyncio.Lock()  # starting, loading, pausing, and replacing a dead process: one at a time
        self._recovery: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._since_s: float | None = None  # when the engine last became busy
        self._counters = EngineCounters()  # of processes that have ended, and of requests
        self._meter = PassMeter()
        self._drafted: DraftedByRows | None = {} if self.settings.speculate else None
        self._kv_tokens = 0
        self._kv: VLLMKv | None = None

    # -- what callers use --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process and load the model; ModelError if it cannot be served."""
        if self._thread is not None:
            raise EngineError(f"{self.settings.model_dir}: this engine was started before; create a new one")
        check_installed()
        config = read_model_config(self.settings.model_dir)
        self._vocab_size = int(config["vocab_size"])
        self._token_bytes = kv_token_bytes(config, self.settings.dtype, self.settings.tp)
        self._max_scored = max_model_tokens(config, self.settings) - 1
        self._expected = ExpectedWeights.of_directory(self.settings.model_dir, tied=bool(config["tie_word_embeddings"]))
        if self.settings.host_kv_gib is not None:
            self._kv = VLLMKv(self.settings, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="libra-vllm", daemon=True)
        self._thread.start()
        try:
            await self._ask(self._start())
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn. Cancelling the awaiting task aborts it."""
        self._check(request)
        return await self._ask(self._generate(request))

    async def abort(self, trajectory_id: str) -> None:
        """End the trajectory's request with StopReason.ABORT, if it has one."""
        await self._ask(self._abort(trajectory_id))

    def forget(self, trajectory_id: str) -> None:
        """Drop its KV from host memory; vLLM drops that of finished requests when others need the memory."""
        self._check_open()
        if self._kv is not None:
            self._loop.call_soon_threadsafe(self._kv.forget, trajectory_id)

    async def export_kv(self, trajectory_id: str) -> KVObject | None:
        """The KV of a trajectory that is between two turns; see MovesKV."""
        if self._closing and self._kv is not None:
            return self._kv.pool.get(trajectory_id)
        return await self._ask(self._export_kv(trajectory_id))

    async def park_kv(self) -> None:
        """Bring all KV between two turns into host memory; see MovesKV."""
        for trajectory_id in [] if self._kv is None else self._kv.trajectories:
            await self.export_kv(trajectory_id)

    async def import_kv(self, kv: KVObject) -> bool:
        """Keep an object for the trajectory's next request; see MovesKV."""
        return await self._ask(self._import_kv(kv))

    async def pause(self) -> None:
        """Stop before the next step."""
        await self._ask(self._pause())

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._ask(self._resume())

    async def load_version(self, version: int, directory: Path) -> None:
        """Serve ``directory/model.safetensors`` as ``version`` from the next token on; see RolloutEngine.

        With ``keep_kv`` running requests continue from the KV they have, which their tokens record in ``kv_versions``.
        """
        await self._ask(self._load(version, Path(directory)))

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probabilities of tokens 1 to T - 1, prefilled by the engine without its prefix cache; see RolloutEngine."""
        if not 2 <= len(token_ids) <= self._max_scored:
            raise EngineError(f"score: got {len(token_ids)} tokens; allowed: 2 to {self._max_scored}")
        return await self._ask(self._probe("score", token_ids))

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Random projections of every layer as used; see RolloutEngine."""
        return await self._ask(self._probe("project", seed))

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Columns of layers as used; see ReadsColumns."""
        return await self._ask(self._probe("columns", wanted))

    def stats(self) -> EngineStats:
        """Counters; context tokens are counted when their request ends. ``retained`` is 0: vLLM does not report it."""
        self._check_open()
        core, since_s, now = self._core, self._since_s, replace(self._counters)
        now.generated_tokens += core.generated_tokens if core else 0
        now.steps += core.steps if core else 0
        drafted = list((self._drafted or {}).values())
        now.drafted_tokens, now.accepted_tokens = sum(s.drafted for s in drafted), sum(s.accepted for s in drafted)
        now.busy_s += time.perf_counter() - since_s if since_s is not None else 0.0
        return now.stats(
            running=len(self._queue.running), waiting=len(self._queue.waiting), retained=0, slots=self.settings.slots,
            version=self.version, by_rows=self._drafted,
        )  # fmt: skip

    def capacity(self) -> EngineCapacity:
        """Its process's KV blocks, and the seconds of its last passes, those of an earlier process included."""
        self._check_open()
        return EngineCapacity(
            kv_tokens=self._kv_tokens, kv_bytes=self._kv_tokens * self._token_bytes, kv_token_bytes=self._token_bytes,
            slots=self.settings.slots, tp=self.settings.tp, steps=self._meter.seconds(),
            max_context_tokens=self.settings.max_context_tokens, exchanges_kv=self._kv is not None,
        )  # fmt: skip

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's processes, the one that schedules first; empty while there is none."""
        return self._core.process_ids if self._core is not None else []

    async def close(self) -> None:
        """Fail what is pending, end the process, and join the thread; may be called twice."""
        if self._thread is None:
            return
        with self._entry:
            first, self._closing = not self._closing, True
            if first and not self._ended:  # a second stop would interrupt `_end`
                self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        if self._kv is not None:
            self._kv.close()

    # -- between the two loops ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._thread is None or self._closing:
            raise EngineError(
                f"{self.settings.model_dir}: the engine is {'closed' if self._closing else 'not started'}"
            )

    def _check(self, request: TurnRequest) -> None:
        self._check_open()
        check_request(request, max_context_tokens=self.settings.max_context_tokens, vocab_size=self._vocab_size)
        packed_priority(request.priority)
        if 0 < request.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"{request.trajectory_id}: got temperature={request.temperature}; vLLM samples at 0, or from "
                f"{MIN_TEMPERATURE} on"
            )

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop and await it in the caller's."""
        with self._entry:
            try:
                self._check_open()
                if self._ended:
                    raise EngineError(f"{self.settings.model_dir}: the engine is closed")
            except EngineError:
                work.close()
                raise
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if self._closing and answer.cancelled() and not _being_cancelled():
                raise EngineError(f"{self.settings.model_dir}: the engine was closed") from None
            raise

    def _run(self) -> None:
        """The engine's thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            with self._entry:
                self._ended = True
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        self._fail_all("the engine was closed")
        if self._core is not None:
            self._core.stop()
        for _ in range(3):  # the latest requests start, are cancelled, and answer
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    # -- in the engine's loop ----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._lock:
            self._core = await Core.start(self.settings, self.version, self._meter, self._drafted)
            self._kv_tokens = self._core.kv_tokens

    async def _generate(self, request: TurnRequest) -> TurnOutput:
        job = VLLMJob(next(self._tickets), request, time.perf_counter())
        job.handle = f"{job.name}#{job.ticket}"
        self._queue.push(job)
        job.answer = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            return await job.answer
        except asyncio.CancelledError:
            if not self._closing:
                self._begin(self._end_job(job))
            raise

    def _admit(self) -> None:
        """Start the requests that have a slot, unless paused; start another process if it died."""
        core = self._core
        if self._queue.waiting and (core is None or core.dead):
            self._recover_soon()
        if self._paused or self._held or core is None or core.dead:
            return
        for job in self._queue.start():
            job.started_s, job.version = time.perf_counter(), self.version
            if self._since_s is None:
                self._since_s = job.started_s
            job.task = self._begin(self._serve(core, job))

    async def _serve(self, core: Core, job: VLLMJob) -> None:
        outcome: TurnOutput | Exception
        try:
            with nullcontext() if self._kv is None else self._kv.brought(job) as kv:
                outcome = await core.serve(job, time.perf_counter, kv)
        except EngineGone as error:
            outcome = error
            self._died(core, error)
        except LibraError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  the boundary of a request: the caller gets it
            outcome = EngineError(f"{job.name}: {type(error).__name__}: {error}")
            outcome.__cause__ = error
        self._leave(job, outcome)
        self._admit()

    def _leave(self, job: VLLMJob, outcome: TurnOutput | Exception) -> None:
        """Answer a job and free its place."""
        if self._kv is not None:
            self._kv.ended(job, outcome)
        self._queue.end(job)
        if not self._queue.running and self._since_s is not None:
            self._counters.busy_s += time.perf_counter() - self._since_s
            self._since_s = None
        if isinstance(outcome, TurnOutput):
            self._counters.cached_tokens += outcome.cached_tokens
            self._counters.prefilled_tokens += len(job.request.context_ids) - outcome.cached_tokens
        if job.answer.done():
            return
        if isinstance(outcome, TurnOutput):
            job.answer.set_result(outcome)
        else:
            job.answer.set_exception(outcome)

    async def _export_kv(self, trajectory_id: str) -> KVObject | None:
        if self._kv is None or self._queue.find(trajectory_id) is not None:
            return None
        async with self._lock:
            return await self._kv.export(await self._living(), trajectory_id, self.version)

    async def _import_kv(self, kv: KVObject) -> bool:
        return self._kv is not None and self._kv.pool.put(kv)

    async def _abort(self, trajectory_id: str) -> None:
        job = self._queue.find(trajectory_id)
        if job is not None:
            await self._end_job(job)

    async def _end_job(self, job: VLLMJob) -> None:
        """End one job with the tokens it has, and wait until its place is free."""
        if self._queue.find(job.name) is not job:
            return
        if job.started_s is None:
            nothing = np.empty(0, np.int32)
            waited_s = time.perf_counter() - job.arrived_s
            self._leave(
                job,
                TurnOutput(nothing, nothing.astype(np.float32), nothing, nothing, StopReason.ABORT, queued_s=waited_s),
            )
            return
        core = self._core
        if core is not None and not core.dead:
            await core.abort(job)
        await asyncio.wait([job.task])

    async def _pause(self) -> None:
        async with self._lock:
            if not self._paused:
                self._paused = True
                await (await self._living()).pause()

    async def _resume(self) -> None:
        async with self._lock:
            if self._paused:
                core = await self._living()
                self._paused = False
                await core.resume()
        self._admit()

    async def _load(self, version: int, directory: Path) -> None:
        begun_s = time.perf_counter()
        path = await asyncio.to_thread(self._expected.check, directory)
        async with self._lock:
            core = await self._living()
            self._held = True
            try:
                if not self._paused:
                    await core.pause()
                if self._kv is not None:
                    self._kv.loaded(version)
                try:
                    await core.load(version, path, self._expected.tied.get(HEAD))
                except EngineGone:
                    raise
                except EngineError as error:
                    await self._back_to_old(core, error)
                    raise WeightsError(f"{path}: version {version} could not be loaded: {error}") from error
                self.version, self._directory = version, directory
                if not self._paused:
                    await core.resume()
            except EngineGone as error:
                self._died(core, error)
                raise
            finally:
                self._held = False
                self._admit()
        logger.info("weights announced: now serving version %d (%.3f s)", version, time.perf_counter() - begun_s)

    async def _back_to_old(self, core: Core, reason: EngineError) -> None:
        """After loading failed half way: load the previous weights again, or else end the process."""
        logger.error("loading new weights failed, the previous ones are loaded again: %s", reason)
        old = self._directory or self.settings.model_dir
        try:
            await core.load(self.version, self._expected.check(old), self._expected.tied.get(HEAD))
            if not self._paused:
                await core.resume()
        except LibraError as error:
            core.stop()
            raise EngineGone(f"{reason}; nor could version {self.version} be loaded again: {error}") from error

    async def _probe(self, what: str, question: Any) -> Any:
        core = self._core
        if core is None or core.dead:
            async with self._lock:
                core = await self._living()
        try:
            return await getattr(core, what)(question)
        except EngineGone as error:
            self._died(core, error)
            raise

    # -- a process that died -----------------------------------------------------------------------------------------

    def _died(self, core: Core, error: Exception) -> None:
        """Fail all requests and start another process at once."""
        if self._core is not core or self._closing:
            return
        logger.error("%s: %s; another one is started", self.settings.model_dir, error)
        self._counters.steps += core.steps
        self._counters.generated_tokens += core.generated_tokens
        self._core = None
        core.stop()
        self._fail_all(str(error))
        self._recover_soon()

    def _fail_all(self, reason: str) -> None:
        for job in self._queue.jobs():
            self._leave(job, EngineError(f"{job.name}: {reason}"))

    def _recover_soon(self) -> None:
        if (self._recovery is None or self._recovery.done()) and not self._closing:
            self._recovery = self._begin(self._recover())

    async def _recover(self) -> None:
        try:
            async with self._lock:
                await self._living()
        except LibraError as error:
            logger.error("%s: no engine process: %s", self.settings.model_dir, error)
            self._fail_all(str(error))
        self._admit()

    async def _living(self) -> Core:
        """The engine process, a new one if it died; the caller holds the lock."""
        if self._core is not None and self._core.dead:
            self._died(self._core, EngineGone("the vLLM engine process died"))
        if self._core is None:
            self.restarts += 1
            version, directory = self.version, self._directory
            core = await Core.start(self.settings, self._first_version, self._meter, self._drafted)
            self._core, self.version, self._directory = core, self._first_version, None
            if self._paused:
                await core.pause()
            if directory is not None:
                try:
                    path = self._expected.check(directory)
                    await core.load(version, path, self._expected.tied.get(HEAD))
                    self.version, self._directory = version, directory
                except LibraError as error:
                    raise EngineError(
                        f"the engine process was replaced, but version {version} can no longer be loaded; it serves "
                        f"version {self.version} until another is loaded: {error}"
                    ) from error
            logger.warning("%s: a new engine process serves version %d", self.settings.model_dir, self.version)
        return self._core

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _being_cancelled() -> bool:
    """Whether the caller itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
