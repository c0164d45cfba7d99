"""The engine of one worker and one run, which serves a version only once it has shown that it holds it.

``pull`` loads the newest version, asks the engine about its layers and a probe, and compares with what the trainer published
(`libra.weights.version_check`). An engine that disagrees is quarantined: closed, started again from the version's own file, and
asked again. Where it disagrees a second time it stays out, and every quantum sent here fails with an EngineError.

``sleep`` closes the engine, so that its memory is free for something else; ``wake`` builds one from the newest version's own
files, of the same kind or another one, and has it checked.

Invariants
1. No token of a version that has not passed leaves `Serving.generate`: a turn that got such tokens waits for the verdict, and
   is generated again where the engine is quarantined.
2. One load, check or restart at a time.
3. An engine whose process died and was replaced (its ``restarts`` grew) is asked again before anything else counts.
4. A check is made of version 0 too; tolerances are measured there and kept, until an engine of another kind is woken: its own
   are measured at the version it was started from, once it has shown to hold that.
5. A version whose file is not what was announced (WeightsError) changes nothing: the engine keeps what it had.
6. Between the call of ``sleep`` and the end of ``wake`` no generation starts, and each one asked for ends with EngineAsleep.
   One that was under way ends as usual, or, aborted, with EngineAsleep: its tokens are thrown away.
7. What fails, or is cancelled, leaves one of two states: ``sleep`` that waits for turns goes back to serving; later, and
   ``wake`` at any point, leave it asleep with nothing in memory, to be woken as the kind it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from libra.errors import EngineAsleep, EngineError, LibraError, ModelError, WeightsError
from libra.projections import project_tensors
from libra.rollout import ReadsColumns, RolloutEngine
from libra.tensors import digest
from libra.types import StopReason, TurnOutput, TurnRequest
from libra.weights import (
    Answers,
    CheckVerdict,
    ExpectedProbes,
    ProbeCalibration,
    VersionCheck,
    WeightStore,
    WeightVersion,
    as_first,
    calibrate,
    expected_columns,
    judge,
    uncalibrated,
)
from libra.worker.model_files import link_model
from libra.worker.reports import quarantined_fields, served_fields

logger = logging.getLogger(__name__)

Build = Callable[[Path, int], RolloutEngine]
"""Makes an engine, not started, that serves a directory in Hugging Face layout as a version."""
Newest = Callable[[], Awaitable[WeightVersion | None]]
"""The newest version, on this machine; None where nothing is published yet."""
Tell = Callable[..., None]
"""Reports to the plugin: kind, then fields."""

TRIES = 4
"""Times that one turn is generated where engines are quarantined under it."""


class Serving:
    """An engine, the version it has shown to hold, and how it is brought to the next.

    Parameters
    ----------
    model_dir : Path
        What version 0 is loaded from; a restarted engine takes all but the weights from there.
    build, newest, tell : callable
        See `Build`, `Newest`, `Tell`.
    store : WeightStore
        Where the versions that ``newest`` gives lie.
    scratch : Path
        Directory for links to a restarted engine's files.
    one_model : asyncio.Lock
        Held while an engine starts again.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        build: Build,
        newest: Newest,
        tell: Tell,
        store: WeightStore,
        scratch: Path | None = None,
        one_model: asyncio.Lock | None = None,
    ) -> None:
        self.model_dir, self.store = model_dir, store
        self._build, self._newest, self._tell, self._scratch = build, newest, tell, scratch
        self._one_model = one_model or asyncio.Lock()
        self.engine: RolloutEngine = build(model_dir, 0)
        self.announced = 0
        self.verified: int | None = None
        self.calibration: ProbeCalibration | None = None
        self.out: EngineError | None = None
        self.asleep = False  # or about to be, or not yet awake
        self.quarantines = 0
        self._under_way: Counter[str] = Counter()  # calls of generate, by trajectory
        self._idle = asyncio.Event()  # nobody is under way
        self._idle.set()
        self._restarts = 0  # of the engine's own process, as last seen
        self._loading = asyncio.Lock()
        self._links: list[tempfile.TemporaryDirectory[str]] = []

    async def start(self) -> None:
        """Start the engine at version 0; ModelError where it cannot be served."""
        await self.engine.start()

    async def close(self) -> None:
        """Close the engine; pending requests fail."""
        await self.engine.close()
        self._unlink()

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """One turn by the newest version, all of whose tokens come from versions that passed their check.

        Raises
        ------
        EngineAsleep
            The engine sleeps, or was put to sleep under this turn.
        EngineError
            The engine failed, or is out.
        """
        with self._counted(request.trajectory_id):
            return await self._generate(request)

    async def _generate(self, request: TurnRequest) -> TurnOutput:
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
            async with self._loading:  # the verdict on the version that was loaded in mid-turn
                if self.quarantines == seen and not self._unchecked(output):
                    return output
        raise self.out or EngineError(f"{request.trajectory_id}: {TRIES} engines were quarantined under one turn")

    @contextlib.contextmanager
    def _counted(self, trajectory_id: str) -> Iterator[None]:
        """One more turn is under way; `sleep` waits for the last one."""
        self._under_way[trajectory_id] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= Counter([trajectory_id])
            if not self._under_way:
                self._idle.set()

    def _check_awake(self, request: TurnRequest) -> None:
        if self.asleep:
            raise EngineAsleep(
                f"{request.trajectory_id}: this worker's engine is put to sleep; another worker has to generate the turn"
            )

    def forget(self, trajectory_id: str) -> None:
        """Free the KV of a trajectory that does not come back; an engine that sleeps or is out has none."""
        if self.out is None and not self.asleep:
            self.engine.forget(trajectory_id)

    def _unchecked(self, output: TurnOutput) -> bool:
        newest = max(output.weight_versions.max(initial=-1), output.kv_versions.max(initial=-1))
        return self.verified is None or int(newest) > self.verified

    async def pull(self) -> None:
        """Bring the engine to the newest version, where it has not shown to hold that already. One asleep is left alone.

        Raises
        ------
        EngineError
            The engine is out.
        WeightsError
            The version cannot be read.
        """
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
                await self._take(newest)

    def _notice_restart(self) -> None:
        """An engine whose process was replaced, by itself, has shown nothing any more."""
        restarts = int(getattr(self.engine, "restarts", 0))
        if restarts != self._restarts:
            self._restarts, self.verified = restarts, None

    async def sleep(self, *, abort: bool = False) -> None:
        """Let no generation start, wait for those under way, and free what the engine holds. Nothing happens where it sleeps.

        Parameters
        ----------
        abort : bool
            Do not wait: turns under way end with EngineAsleep, and what they have generated so far is lost.
        """
        if self.asleep:
            return
        started_s, turns, self.asleep = time.perf_counter(), self._under_way.total(), True
        self._tell("asleep")
        try:
            if (
                abort
            ):  # nobody asks this engine any more; one that is just being replaced fails all that it has by itself
                await asyncio.gather(*map(self.engine.abort, list(self._under_way)), return_exceptions=True)
            await self._idle.wait()
            await self._loading.acquire()
        except asyncio.CancelledError:
            self.asleep = False
            self._tell("awake")
            raise
        drained_s = time.perf_counter()
        try:
            await _to_the_end(self._shutdown())
        finally:
            self._loading.release()
        logger.info(
            "asleep: %d turns %s in %.3f s, the engine was closed in %.3f s",
            turns, "were aborted" if abort else "ended", drained_s - started_s, time.perf_counter() - drained_s,
        )  # fmt: skip

    async def wake(self, build: Build | None = None) -> None:
        """Serve again: an engine from the newest version's own files, which counts once it has passed its check.

        Parameters
        ----------
        build : callable, optional
            Makes the engine from now on. None: the one that made it before.

        Raises
        ------
        EngineError, ModelError, WeightsError
            There is no such engine, or it does not hold the version; it stays asleep, and can be woken otherwise.
        """
        async with self._loading:
            if not self.asleep:
                raise EngineError("wake: this engine is awake; call sleep first")
            before = self._build, self.calibration
            if build is not None:  # another kind of engine rounds otherwise
                self._build, self.calibration = build, None
            self.out = None
            try:
                await self._start_verified(await self._newest())
            except BaseException:
                self._build, self.calibration = before
                await _to_the_end(self._shutdown())
                raise
            self.asleep = False
            self._tell("awake")

    async def _start_verified(self, version: WeightVersion | None) -> None:
        """Start an engine at a version and have it checked."""
        started_s = time.perf_counter()
        if version is None:
            await self._fresh(None)
            return
        self.announced = max(self.announced, version.number)
        check = await asyncio.to_thread(self._check_of, version)
        await asyncio.to_thread(self._content, version, check)
        await self._fresh(version)
        load_s = time.perf_counter() - started_s
        asked = await asyncio.to_thread(self._expected, check, version, [version.number - 1])
        try:
            verdict = await self._verdict(check, *asked)
        except EngineError as error:
            verdict = _no_answer(check, error)
        await self._settle(version, check, asked, verdict, started_s, started_s, load_s)

    async def _shutdown(self) -> None:
        """Close the engine and let go of all that it held; nothing of it may come back."""
        await self.engine.close()
        self.verified = None
        self._unlink()
        await asyncio.to_thread(_collect)

    async def _take(self, version: WeightVersion) -> None:
        started_s = time.perf_counter()
        self.announced = max(self.announced, version.number)  # turns that come now wait
        before = sorted({self.engine.version, version.number - 1} - {version.number})
        check = await asyncio.to_thread(self._check_of, version)
        # What needs no engine comes first: it serves what it has meanwhile.
        (wanted, expected), _ = await asyncio.gather(
            asyncio.to_thread(self._expected, check, version, before), asyncio.to_thread(self._content, version, check)
        )
        prepared_s = time.perf_counter()
        try:
            if self.calibration is None:
                self.calibration = await self._calibrate(check)
            loading_s = time.perf_counter()
            if self.engine.version != version.number:
                await self.engine.load_version(version.number, version.directory)
            load_s = time.perf_counter() - loading_s
            verdict = judge(check, expected, await self._ask(check, wanted), self.calibration)
        except EngineError as error:
            load_s, verdict = 0.0, _no_answer(check, error)
        await self._settle(version, check, (wanted, expected), verdict, started_s, prepared_s, load_s)

    async def _settle(
        self,
        version: WeightVersion,
        check: VersionCheck,
        asked: tuple[dict[str, tuple[int, ...]], ExpectedProbes],
        verdict: CheckVerdict,
        started_s: float,
        stopped_s: float,
        load_s: float,
    ) -> None:
        """Serve the version where the verdict allows it; else start the engine again and ask once more.

        ``started_s`` and ``stopped_s``: when taking it up began, and when the engine ceased to serve the one before.
        """
        if not verdict.passed:
            self._quarantine(version, verdict, out=False)
            stopped_s = time.perf_counter()
            verdict = await self._again(check, version, *asked)
            load_s = 0.0
        if not verdict.passed:
            self.out = EngineError(
                f"engine: version {version.number} cannot be served: {verdict.layer}: {verdict.detail}, and so it was after "
                f"a restart from {version.directory}; this worker's engine stays out. Restart the worker to try again; where "
                "every worker says so, the engine does not support this model"
            )
            self._quarantine(version, verdict, out=True)
            await self.engine.close()
            raise self.out
        self.verified = version.number
        now_s = time.perf_counter()
        logger.info(
            "version %d checked by %s (%.3f s): %s", version.number, verdict.method, now_s - started_s, verdict.detail
        )
        measured = self.calibration is not None and self.calibration.measured
        check_s = now_s - started_s - load_s
        self._tell("served", **served_fields(version.number, verdict, measured, load_s, check_s, now_s - stopped_s))

    async def _again(
        self, check: VersionCheck, version: WeightVersion, wanted: dict[str, tuple[int, ...]], expected: ExpectedProbes
    ) -> CheckVerdict:
        """Start an engine from nothing but the version's own files, and ask it."""
        await self.engine.close()
        self._unlink()
        try:
            await self._fresh(version)
            return await self._verdict(check, wanted, expected)
        except (EngineError, ModelError) as error:
            return _no_answer(check, error)

    async def _fresh(self, version: WeightVersion | None) -> None:
        """Start an engine that was never another; None: of version 0, as the model's directory has it."""
        directory = self.model_dir
        if version is not None:
            self._links.append(tempfile.TemporaryDirectory(prefix="libra-engine-", dir=self._scratch))
            directory = Path(self._links[-1].name)
            link_model(self.model_dir, version, directory)
        self.engine, self._restarts = self._build(directory, 0 if version is None else version.number), 0
        async with self._one_model:
            await self.engine.start()

    def _unlink(self) -> None:
        """Remove the files of engines that are closed."""
        while self._links:
            self._links.pop().cleanup()

    async def _verdict(
        self, check: VersionCheck, wanted: dict[str, tuple[int, ...]], expected: ExpectedProbes
    ) -> CheckVerdict:
        """Whether an engine that was started from a version's files holds it. Tolerances not known yet are measured at it."""
        answers = await self._ask(check, wanted)
        verdict = judge(check, expected, answers, self.calibration or uncalibrated(check.dtype))
        if verdict.passed and self.calibration is None:
            self.calibration = calibrate(check, answers)
        return verdict

    async def _calibrate(self, check: VersionCheck) -> ProbeCalibration:
        """Tolerances: what separates trainer and engine at version 0, which the engine holds now."""
        first = check if check.version == 0 else as_first(check)
        if self.engine.version != 0 or first is None:
            logger.warning("weights: version 0 cannot be compared any more; tolerances are the widest there are")
            return uncalibrated(check.dtype)
        return calibrate(first, await self._ask(first, {}))

    async def _ask(self, check: VersionCheck, wanted: dict[str, tuple[int, ...]]) -> Answers:
        engine = self.engine
        columns = await engine.columns(wanted) if wanted and isinstance(engine, ReadsColumns) else {}
        projections = await engine.project(check.seed) if check.projections else {}
        logp = [await engine.score(np.array(row, np.int32)) for row in check.probe]
        return Answers(tuple(logp), projections, columns)

    def _expected(
        self, check: VersionCheck, version: WeightVersion, before: list[int]
    ) -> tuple[dict[str, tuple[int, ...]], ExpectedProbes]:
        if not isinstance(self.engine, ReadsColumns):
            return {}, ExpectedProbes()
        held = [version.path.parent.parent / f"{number:08d}" / version.path.name for number in before if number >= 0]
        dtype = getattr(torch, check.dtype)
        return expected_columns(version.path, held, self.store.tied(version.number), dtype, seed=version.number)

    def _content(self, version: WeightVersion, check: VersionCheck) -> None:
        """WeightsError where the file is not what the trainer hashed."""
        got = digest(self.store.read(version, verify=False))
        if got != check.digest:
            raise WeightsError(
                f"weights: {version.path} has digest {got}, its check says {check.digest}; the file was altered"
            )

    def _check_of(self, version: WeightVersion) -> VersionCheck:
        """What was published with the version; of one without a check, what its file says."""
        text = self.store.check_text(version.number)
        if text is not None:
            return VersionCheck.from_json(text, version.directory)
        tensors = self.store.read(version)
        kind = next(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.ndim == 2)
        return VersionCheck(
            version.number, version.digest, kind, version.number, project_tensors(tensors, version.number)
        )

    def _quarantine(self, version: WeightVersion, verdict: CheckVerdict, *, out: bool) -> None:
        self.quarantines += 1
        logger.error(
            "engine disagrees with version %d: %s: %s; %s", version.number, verdict.layer, verdict.detail,
            "it stays out" if out else "it is closed and started from that version's file",
        )  # fmt: skip
        self._tell("quarantined", **quarantined_fields(version.number, verdict, out=out))


def _collect() -> None:
    """Free a closed engine's modules: they lie in cycles, and what a host froze is not looked at by collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must not stop half way; who is cancelled meanwhile is so afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def _no_answer(check: VersionCheck, error: LibraError) -> CheckVerdict:
    return CheckVerdict(
        False, "probe", "(all)", math.inf, 0.0, None, len(check.projections), None, 0.0, f"the engine failed: {error}"
    )
