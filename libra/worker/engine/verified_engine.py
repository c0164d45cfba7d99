"""The engine of one worker in one run, which serves a version only after a check of its weights.

``pull`` loads the newest version and checks the engine. An engine that fails is quarantined:
closed, restarted from the version's file, and checked again. After a second failure the engine is
out of service, and every quantum sent to it fails with an EngineError. ``sleep`` closes the engine
to free memory; ``wake`` builds an engine from the newest version's file and checks it.

Invariants
----------
1. `Serving.generate` returns no token of an unverified version: a turn with such tokens waits for
   the check, and is generated again if the engine is quarantined.
2. At most one load, check or restart runs at a time. A version whose file differs from the
   announced one changes nothing.
3. An engine whose process was replaced (``restarts`` grew) is checked again before any of its
   tokens counts.
4. Tolerances are measured at version 0 and kept. A different kind of engine must first pass the
   check of the version that woke it, and then measures its own tolerances there.
5. Between the call of ``sleep`` and the end of ``wake`` no generation starts, and each request ends
   with EngineAsleep. A running generation ends normally, or is aborted and its tokens are dropped.
6. If ``sleep`` fails or is cancelled while it waits for running turns, the engine serves again.
   A later failure of ``sleep``, or any failure of ``wake``, leaves it asleep with its memory free.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from libra import facts
from libra.errors import EngineAsleep, EngineError, ModelError
from libra.rollout import RolloutEngine
from libra.rollout.engine import MovesKV
from libra.types import StopReason, TurnOutput, TurnRequest
from libra.weights import WeightStore, WeightVersion
from libra.weights.version_check import CheckVerdict
from libra.worker.engine.engine_check import EngineCheck, Questions, no_answer
from libra.worker.model_files import collect_frozen, link_model

logger = logging.getLogger(__name__)

Build = Callable[[Path, int], RolloutEngine]
"""Makes an engine, not started, that serves a directory in Hugging Face layout as a version."""
Newest = Callable[[], Awaitable[WeightVersion | None]]
"""The newest version, on this machine; None before the first."""
SendFact = Callable[[facts.Fact], None]
"""Sends a fact of the engine to the scheduler, which fills in the worker's name."""

TRIES = 4
"""Attempts at one turn if its engine is quarantined during it."""


@dataclass(slots=True)
class EngineStarter:
    """Builds engines; keeps links to their files in ``scratch``."""

    model_dir: Path
    build: Build
    scratch: Path | None
    one_model: asyncio.Lock
    _links: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    def make(self, version: WeightVersion | None) -> RolloutEngine:
        """An engine, not yet started, from a version's file, or from ``model_dir`` (version 0)."""
        if version is None:
            return self.build(self.model_dir, 0)
        self._links.append(tempfile.TemporaryDirectory(prefix="libra-engine-", dir=self.scratch))
        directory = Path(self._links[-1].name)
        link_model(self.model_dir, version, directory)
        return self.build(directory, version.number)

    def unlink(self) -> None:
        while self._links:
            self._links.pop().cleanup()


class _Turns:
    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def one(self, trajectory_id: str) -> Iterator[None]:
        self.running[trajectory_id] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= Counter([trajectory_id])
            if not self.running:
                self.idle.set()


class Serving:
    """An engine with its verified version, and the update to the next version.

    ``model_dir``: version 0, and all files but weights for a restart. ``store``: the versions that
    ``newest`` returns. ``scratch``: directory for links to a restarted engine's files.
    ``one_model``: lock held while an engine restarts. ``recheck``: whether to check a version once
    more before the engine leaves it, to report a changed layer.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        build: Build,
        newest: Newest,
        report: SendFact,
        store: WeightStore,
        scratch: Path | None = None,
        one_model: asyncio.Lock | None = None,
        recheck: bool = False,
    ) -> None:
        self.starter = EngineStarter(model_dir, build, scratch, one_model or asyncio.Lock())
        self.engine_check = EngineCheck(store)
        self._newest, self._report = newest, report
        self.engine: RolloutEngine = self.starter.make(None)
        self.announced = 0
        self.verified: int | None = None
        self._recheck, self._held = recheck, cast("Questions | None", None)  # version that last passed
        self.out: EngineError | None = None
        self.asleep = False  # or about to be, or not yet awake
        self.quarantines = 0
        self._turns = _Turns()
        self._restarts = 0  # restarts of the engine's process, as last seen
        self._loading = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start the engine at version 0. Raises ModelError if the model cannot be served."""
        await self.engine.start()

    async def close(self) -> None:
        """Close the engine permanently; pending requests and a running load fail."""
        self._closed = True
        await self.engine.close()
        self.starter.unlink()

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn with the newest version; all tokens come from verified versions.

        Raises EngineAsleep if the engine is or falls asleep, EngineError if it fails or is out of
        service.
        """
        with self._turns.one(request.trajectory_id):
            for _ in range(TRIES):
                await self.pull()
                self._check_awake(request)
                seen = self.quarantines
                try:
                    output = await self.engine.generate(request)
                except EngineError:
                    if self.quarantines == seen:
                        raise
                    logger.info("quarantine: %s is generated again", request.trajectory_id)
                    continue
                if output.stop_reason is StopReason.ABORT:
                    self._check_awake(request)
                self._notice_restart()
                if not self._unchecked(output):
                    return output
                async with self._loading:  # the verdict on the version that was loaded during the turn
                    if self.quarantines == seen and not self._unchecked(output):
                        return output
        raise self.out or EngineError(f"{request.trajectory_id}: {TRIES} engines were quarantined during one turn")

    def _check_awake(self, request: TurnRequest) -> None:
        if self.asleep:
            raise EngineAsleep(
                f"{request.trajectory_id}: this worker's engine is put to sleep; another worker has to generate the turn"
            )

    def forget(self, trajectory_id: str) -> None:
        """Free the KV cache of an ended trajectory; no effect while the engine has no memory."""
        if self.out is None and not self.asleep:
            self.engine.forget(trajectory_id)

    def _unchecked(self, output: TurnOutput) -> bool:
        newest = max(output.weight_versions.max(initial=-1), output.kv_versions.max(initial=-1))
        return self.verified is None or int(newest) > self.verified

    async def pull(self) -> None:
        """Update an awake engine to the newest version, unless that version is verified.

        Raises EngineError if the engine is out of service, WeightsError if the version is bad.
        """
        self._check_open()
        self._notice_restart()
        if self.asleep or (self.out is None and self.verified is not None and self.announced <= self.verified):
            return
        async with self._loading:
            if self.asleep:
                return
            if self.out is not None:
                raise self.out
            newest = await self._newest()
            if newest is not None and (self.verified is None or newest.number > self.verified):
                await self._load(newest)

    def _notice_restart(self) -> None:
        restarts = int(getattr(self.engine, "restarts", 0))
        if restarts != self._restarts:
            self._restarts, self.verified = restarts, None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.starter.model_dir}: the engine is closed")

    # ---------------------------------------------------------------- sleep and wake

    async def sleep(self, *, abort: bool = False) -> None:
        """Stop new generations, wait for running ones, and free the engine's memory; idempotent.

        With ``abort``, running turns end at once with EngineAsleep, and their tokens are dropped.
        """
        if self.asleep:
            return
        started_s, turns, self.asleep = time.perf_counter(), self._turns.running.total(), True
        self._report(facts.EngineSlept(""))
        try:
            if abort:  # an engine that is being replaced fails its requests itself
                await asyncio.gather(*map(self.engine.abort, list(self._turns.running)), return_exceptions=True)
            await self._turns.idle.wait()
            await self._loading.acquire()
        except asyncio.CancelledError:
            self.asleep = False
            self._report(facts.EngineWoke(""))
            raise
        drained_s = time.perf_counter()
        try:
            await _to_the_end(self._park_and_shutdown())
        finally:
            self._loading.release()
        logger.info(
            "asleep: %d turns %s in %.3f s, the engine was closed in %.3f s",
            turns, "were aborted" if abort else "ended", drained_s - started_s, time.perf_counter() - drained_s,
        )  # fmt: skip

    async def wake(self, build: Build | None = None) -> None:
        """Build an engine from the newest version's file, check it, and serve again.

        ``build``, if given, replaces the function that builds engines. After an EngineError,
        ModelError or WeightsError the engine stays asleep.
        """
        async with self._loading:
            if not self.asleep:
                raise EngineError("wake: this engine is awake; call sleep first")
            starter, check = self.starter, self.engine_check
            before = starter.build, check.calibration
            if build is not None:  # another kind of engine rounds differently
                starter.build, check.calibration = build, None
            self.out = None
            try:
                newest = await self._newest()
                self.engine, self._restarts = starter.make(newest), 0
                if newest is None:
                    await self._start()
                else:
                    await self._load(newest, start=True)
            except BaseException:
                starter.build, check.calibration = before
                await _to_the_end(self._shutdown())
                raise
            self.asleep = False
            self._report(facts.EngineWoke(""))

    async def _park_and_shutdown(self) -> None:
        try:
            if self.out is None and self.engine.capacity().exchanges_kv:
                await cast("MovesKV", self.engine).park_kv()
        except EngineError as error:
            logger.warning("asleep: KV was lost: %s", error)
        await self._shutdown()

    async def _shutdown(self) -> None:
        await self.engine.close()
        self.verified = None
        self.starter.unlink()
        await asyncio.to_thread(collect_frozen)

    async def _start(self) -> None:
        async with self.starter.one_model:
            self._check_open()
            await self.engine.start()

    # ---------------------------------------------------------------- versions

    async def _load(self, version: WeightVersion, *, start: bool = False) -> None:
        """Load the version, or ``start`` from its file; check it, and serve it if it passes."""
        started_s, number = time.perf_counter(), version.number
        self.announced = max(self.announced, number)  # turns that arrive now wait
        engine, engine_check = self.engine, self.engine_check
        if not start:
            await self._leave_version()
        # Work that needs no engine comes first: an engine that is awake serves its version meanwhile.
        before = {number - 1} if start else {engine.version, number - 1} - {number}
        questions = await engine_check.questions(engine, version, sorted(before))
        stopped_s, load_s = time.perf_counter(), 0.0
        if start:
            await self._start()
            stopped_s, load_s = started_s, time.perf_counter() - started_s
        try:
            if not start:
                await engine_check.calibrate(engine, questions.check)
                loading_s = time.perf_counter()
                if engine.version != number:
                    await engine.load_version(number, version.directory)
                load_s = time.perf_counter() - loading_s
            verdict = await engine_check.verdict(engine, questions)
        except EngineError as error:
            verdict = no_answer(questions.check, error)
        self._check_open()
        if not verdict.passed:
            self._quarantine(version, verdict, out=False)
            stopped_s, load_s = time.perf_counter(), 0.0
            verdict = await self._restart(questions)
            self._check_open()
        if not verdict.passed:
            self.out = EngineError(
                f"engine: version {number} cannot be served: {verdict.layer}: {verdict.detail}, and so it was after "
                f"a restart from {version.directory}; this worker's engine stays out. Restart the worker to try again; where "
                "every worker reports this, the engine does not support this model"
            )
            self._quarantine(version, verdict, out=True)
            await self.engine.close()
            raise self.out
        self.verified, self._held = number, questions
        now_s = time.perf_counter()
        check_s, stopped_s = now_s - started_s - load_s, now_s - stopped_s
        logger.info("version %d checked by %s (%.3f s): %s", number, verdict.method, now_s - started_s, verdict.detail)
        self._report(facts.VersionServed(number, "", round(load_s, 6)))
        self._report(self._checked(number, verdict, check_s, stopped_s))

    def _checked(self, number: int, verdict: CheckVerdict, check_s: float, stopped_s: float) -> facts.VersionChecked:
        calibration = self.engine_check.calibration
        return facts.VersionChecked(
            version=number, worker="", method=verdict.method, gap=verdict.gap, tolerance=verdict.tolerance,
            moved_nats=verdict.moved_nats, layers=verdict.num_layers, changed_layers=verdict.num_changed,
            smallest_change=verdict.smallest_change, measured=calibration is not None and calibration.measured,
            check_s=round(check_s, 6), stopped_s=round(stopped_s, 6),
        )  # fmt: skip

    async def _leave_version(self) -> None:
        held, engine = self._held, self.engine
        if not self._recheck or held is None or not held.version.number == self.verified == engine.version:
            return
        try:
            verdict = await self.engine_check.verdict(engine, held)
        except EngineError as error:
            verdict = no_answer(held.check, error)
        if not verdict.passed:
            logger.error(
                "engine no longer holds version %d, of which it has passed the check: %s: %s",
                self.verified, verdict.layer, verdict.detail,
            )  # fmt: skip
        self._report(facts.VersionRechecked(passed=verdict.passed, **_verdict_fields(held.version, verdict)))

    async def _restart(self, questions: Questions) -> CheckVerdict:
        await self.engine.close()
        self.starter.unlink()
        try:
            self.engine, self._restarts = self.starter.make(questions.version), 0
            await self._start()
            return await self.engine_check.verdict(self.engine, questions)
        except (EngineError, ModelError) as error:
            return no_answer(questions.check, error)

    def _quarantine(self, version: WeightVersion, verdict: CheckVerdict, *, out: bool) -> None:
        self.quarantines += 1
        logger.error(
            "engine disagrees with version %d: %s: %s; %s", version.number, verdict.layer, verdict.detail,
            "it stays out" if out else "it is closed and started from that version's file",
        )  # fmt: skip
        self._report(facts.EngineQuarantined(out=out, **_verdict_fields(version, verdict)))


def _verdict_fields(version: WeightVersion, verdict: CheckVerdict) -> dict[str, Any]:
    gap = verdict.gap if math.isfinite(verdict.gap) else None
    return {
        "worker": "", "version": version.number, "layer": verdict.layer, "method": verdict.method, "gap": gap,
        "tolerance": verdict.tolerance, "detail": verdict.detail,
    }  # fmt: skip


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must not be interrupted; a cancellation takes effect afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
