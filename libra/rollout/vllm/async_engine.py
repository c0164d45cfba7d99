"""The vLLM engine: an AsyncLLM and its process, fed from an event loop on a thread of its own.

Callers are coroutines of any event loop; their requests run in the engine's loop, in one order.

1. Every ``generate`` ends once: with its output, or with EngineError; a dead process fails all its
   requests.
2. A dead process is replaced before the next request is served, with the same weights.
3. Requests wait here, in order of priority and arrival, until one of ``slots`` is free. vLLM never
   has more requests, so no started request is preempted, even if an update makes vLLM compute it
   again.
4. Between ``pause`` and ``resume``, and while weights are loaded, only probes take a step
   (`probe_scheduler`).
5. A version is served completely or not at all: a file that does not fit is refused before anything
   changes; if loading fails half way, the process is replaced by a process with the previous
   weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from libra.config.sections import check_vllm
from libra.errors import EngineError, LibraError, WeightsError
from libra.rollout.capacity import PassMeter, kv_token_bytes, read_model_config
from libra.rollout.engine import EngineCounters, EngineStats, check_request, packed_priority
from libra.rollout.slot_table import RequestQueue
from libra.rollout.vllm.engine_args import VLLMSettings, max_model_tokens
from libra.rollout.vllm.engine_process import Core, EngineGone, VLLMJob
from libra.rollout.weight_loading import HEAD, ExpectedWeights
from libra.types import EngineCapacity, StopReason, TurnOutput, TurnRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value."""


class VLLMEngine:
    """Continuous batching by vLLM, in one process per engine and tensor-parallel rank. ``version``
    is the number of the weights in ``model_dir``; ``options`` are fields of `VLLMSettings`."""

    continues_turns = True

    def __init__(self, model_dir: Path | str, *, version: int = 0, **options: Any) -> None:
        self.settings = VLLMSettings(model_dir=Path(model_dir), **options)
        self.version = version
        self.restarts = 0
        self._first_version = version
        self._directory: Path | None = None  # of the version in use; None for model_dir
        self._core: Core | None = None
        self._queue: RequestQueue[VLLMJob] = RequestQueue(self.settings.slots)
        self._tickets = itertools.count()
        self._paused = self._held = False
        self._loop = EngineLoop(str(self.settings.model_dir), self._end)
        self._lock = asyncio.Lock()  # starting, loading, pausing, and replacing a dead process: one at a time
        self._recovery: asyncio.Task[None] | None = None
        self._busy_from_s: float | None = None  # when the engine last became busy
        self._counters = EngineCounters()  # of processes that have ended, and of requests
        self._meter = PassMeter()

    # -- what callers use --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process and load the model; ModelError if it cannot be served."""
        check_vllm()
        self._model = _Model.of(self.settings)
        self._loop.start()
        try:
            await self._loop.ask(self._start())
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn. Cancelling the awaiting task aborts it."""
        self._check(request)
        return await self._loop.ask(self._generate(request))

    async def abort(self, trajectory_id: str) -> None:
        await self._loop.ask(self._abort(trajectory_id))

    def forget(self, trajectory_id: str) -> None:
        """Do nothing: vLLM drops the KV of finished requests when others need the memory."""
        self._loop.check_open()

    async def pause(self) -> None:
        """Stop before the next step."""
        await self._loop.ask(self._pause())

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._loop.ask(self._resume())

    async def load_version(self, version: int, directory: Path) -> None:
        """See RolloutEngine. With ``keep_kv`` running requests keep their KV."""
        await self._loop.ask(self._load(version, Path(directory)))

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """See RolloutEngine. Prefilled without the prefix cache."""
        if not 2 <= len(token_ids) <= self._model.max_scored:
            raise EngineError(f"score: got {len(token_ids)} tokens; allowed: 2 to {self._model.max_scored}")
        return await self._loop.ask(self._probe("score", token_ids))

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        return await self._loop.ask(self._probe("project", seed))

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        return await self._loop.ask(self._probe("columns", wanted))

    def stats(self) -> EngineStats:
        """Counters; context tokens count when their request ends. vLLM does not report ``retained``."""
        self._loop.check_open()
        core, begun_s, now = self._core, self._busy_from_s, replace(self._counters)
        now.generated_tokens += core.generated_tokens if core else 0
        now.steps += core.steps if core else 0
        now.busy_s += 0.0 if begun_s is None else time.perf_counter() - begun_s
        return now.stats(
            running=len(self._queue.running), waiting=len(self._queue.waiting), retained=0, slots=self.settings.slots,
            version=self.version,
        )  # fmt: skip

    def capacity(self) -> EngineCapacity:
        """See RolloutEngine. Passes of an earlier process count too."""
        self._loop.check_open()
        tokens, token_bytes, settings = self._model.kv_tokens, self._model.token_bytes, self.settings
        return EngineCapacity(
            kv_tokens=tokens, kv_bytes=tokens * token_bytes, kv_token_bytes=token_bytes, slots=settings.slots, tp=settings.tp,
            steps=self._meter.seconds(), max_context_tokens=settings.max_context_tokens,
        )  # fmt: skip

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's processes, the scheduling one first; empty if none runs."""
        return self._core.process_ids if self._core is not None else []

    async def close(self) -> None:
        """Fail pending requests, end the process, and join the thread; may be called twice."""
        await self._loop.close()

    def _check(self, request: TurnRequest) -> None:
        self._loop.check_open()
        check_request(request, max_context_tokens=self.settings.max_context_tokens, vocab_size=self._model.vocab_size)
        packed_priority(request.priority)
        if 0 < request.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"{request.trajectory_id}: got temperature={request.temperature}; vLLM samples at 0, or from "
                f"{MIN_TEMPERATURE} on"
            )

    def _end(self) -> None:
        self._fail_all("the engine was closed")
        if self._core is not None:
            self._core.stop()

    # -- in the engine's loop ----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._lock:
            self._core = await Core.start(self.settings, self.version, self._meter)
            self._model.kv_tokens = self._core.kv_tokens

    async def _generate(self, request: TurnRequest) -> TurnOutput:
        job = VLLMJob(next(self._tickets), request, time.perf_counter())
        job.handle = f"{job.name}#{job.ticket}"
        self._queue.push(job)
        job.answer = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            return await job.answer
        except asyncio.CancelledError:
            if not self._loop.closing:
                self._loop.begin(self._end_job(job))
            raise

    def _admit(self) -> None:
        core = self._core
        if self._queue.waiting and (core is None or core.dead):
            self._recover_soon()
        if self._paused or self._held or core is None or core.dead:
            return
        for job in self._queue.start():
            job.started_s, job.version = time.perf_counter(), self.version
            if self._busy_from_s is None:
                self._busy_from_s = job.started_s
            job.task = self._loop.begin(self._serve(core, job))

    async def _serve(self, core: Core, job: VLLMJob) -> None:
        outcome: TurnOutput | Exception
        try:
            outcome = await core.serve(job, time.perf_counter)
        except LibraError as error:
            outcome = error
            if isinstance(error, EngineGone):
                self._died(core, error)
        except Exception as error:  # noqa: BLE001  the boundary of a request: the caller gets it
            outcome = EngineError(f"{job.name}: {type(error).__name__}: {error}")
            outcome.__cause__ = error
        self._leave(job, outcome)
        self._admit()

    def _leave(self, job: VLLMJob, outcome: TurnOutput | Exception) -> None:
        self._queue.end(job)
        if not self._queue.running and self._busy_from_s is not None:
            self._counters.busy_s += time.perf_counter() - self._busy_from_s
            self._busy_from_s = None
        if isinstance(outcome, TurnOutput):
            self._counters.cached_tokens += outcome.cached_tokens
            self._counters.prefilled_tokens += len(job.request.context_ids) - outcome.cached_tokens
        if not job.answer.done():
            answer = job.answer.set_result if isinstance(outcome, TurnOutput) else job.answer.set_exception
            answer(outcome)

    async def _abort(self, trajectory_id: str) -> None:
        job = self._queue.find(trajectory_id)
        if job is not None:
            await self._end_job(job)

    async def _end_job(self, job: VLLMJob) -> None:
        if self._queue.find(job.name) is not job:
            return
        if job.started_s is None:
            none, waited_s = np.empty(0, np.int32), time.perf_counter() - job.arrived_s
            output = TurnOutput(none, none.astype(np.float32), none, none, StopReason.ABORT, queued_s=waited_s)
            self._leave(job, output)
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
        begun_s, expected = time.perf_counter(), self._model.expected
        path = await asyncio.to_thread(expected.check, directory)
        async with self._lock:
            core = await self._living()
            self._held = True
            try:
                if not self._paused:
                    await core.pause()
                await core.load(version, path, expected.tied.get(HEAD))
                self.version, self._directory = version, directory
                if not self._paused:
                    await core.resume()
            except EngineGone as error:
                self._died(core, error)
                raise
            except EngineError as error:  # modules may have weights of two versions
                self._died(core, error)
                raise WeightsError(f"{path}: version {version} could not be loaded: {error}") from error
            finally:
                self._held = False
                self._admit()
        logger.info("weights announced: now serving version %d (%.3f s)", version, time.perf_counter() - begun_s)

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
        if self._core is not core or self._loop.closing:
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
        if (self._recovery is None or self._recovery.done()) and not self._loop.closing:
            self._recovery = self._loop.begin(self._recover())

    async def _recover(self) -> None:
        try:
            async with self._lock:
                await self._living()
        except LibraError as error:
            logger.error("%s: no engine process: %s", self.settings.model_dir, error)
            self._fail_all(str(error))
        self._admit()

    async def _living(self) -> Core:
        if self._core is not None and self._core.dead:
            self._died(self._core, EngineGone("the vLLM engine process died"))
        if self._core is None:
            self.restarts += 1
            version, directory = self.version, self._directory
            core = await Core.start(self.settings, self._first_version, self._meter)
            self._core, self.version, self._directory = core, self._first_version, None
            if self._paused:
                await core.pause()
            if directory is not None:
                try:
                    path = self._model.expected.check(directory)
                    await core.load(version, path, self._model.expected.tied.get(HEAD))
                    self.version, self._directory = version, directory
                except LibraError as error:
                    raise EngineError(
                        f"the engine process was replaced, but version {version} can no longer be loaded; it serves "
                        f"version {self.version} until another is loaded: {error}"
                    ) from error
            logger.warning("%s: a new engine process serves version %d", self.settings.model_dir, self.version)
        return self._core


@dataclass(slots=True)
class _Model:
    """A model directory; ``max_scored``: maximum tokens of `VLLMEngine.score`."""

    vocab_size: int
    token_bytes: int
    max_scored: int
    expected: ExpectedWeights
    kv_tokens: int = 0

    @classmethod
    def of(cls, settings: VLLMSettings) -> _Model:
        config = read_model_config(settings.model_dir)
        return cls(
            int(config["vocab_size"]),
            kv_token_bytes(config, settings.dtype, settings.tp),
            max_model_tokens(config, settings) - 1,
            ExpectedWeights.of_directory(settings.model_dir, tied=bool(config["tie_word_embeddings"])),
        )


class EngineLoop:
    """An event loop on a thread of its own, in which coroutines of other loops run. Every coroutine
    given to `ask` ends: with its result, its error, or EngineError once the loop is closed.
    ``at_end`` runs in the loop when it closes, before tasks are cancelled."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._name, self._at_end = name, at_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="libra-vllm", daemon=True)
        self._entry = threading.Lock()  # between callers and the end of the loop
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closing = False

    def start(self) -> None:
        """Start the thread; EngineError if it was started before."""
        if self._loop is not None:
            raise EngineError(f"{self._name}: this engine was started before; create a new one")
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def check_open(self) -> asyncio.AbstractEventLoop:
        """The loop; EngineError before `start` and after `close`."""
        if self._loop is None or self.closing:
            raise EngineError(f"{self._name}: the engine is {'not started' if self._loop is None else 'closed'}")
        return self._loop

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop and await it in the caller's."""
        with self._entry:
            try:
                answer = asyncio.run_coroutine_threadsafe(work, self.check_open())
            except EngineError:
                work.close()
                raise
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.closing and answer.cancelled() and not (caller and caller.cancelling()):
                raise EngineError(f"{self._name}: the engine was closed") from None
            raise

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task; called in this loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all tasks and join the thread; may be called twice."""
        if self._loop is None:
            return
        with self._entry:
            first, self.closing = not self.closing, True
            if first:
                self._loop.call_soon_threadsafe(self._end.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        own = cast("asyncio.AbstractEventLoop", self._loop)
        with asyncio.Runner(loop_factory=lambda: own) as runner:  # cancels all tasks at its end
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._end.wait()
        self._at_end()
