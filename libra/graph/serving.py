"""The engine of one worker and one run, which serves a version only once it has shown that it holds it.

``pull`` loads the newest version, asks the engine about its layers and a probe, and compares with what the trainer published
(`libra.weights.verify`). An engine that disagrees is quarantined: closed, started again from the version's own file, and
asked again. Where it disagrees a second time it stays out, and every quantum sent here fails with an EngineError.

Invariants
1. No token of a version that has not passed leaves `Serving.generate`: a turn that got such tokens waits for the verdict, and
   is generated again where the engine is quarantined.
2. One load, check or restart at a time.
3. A check is made of version 0 too; tolerances are measured there, and kept for as long as the worker lives.
4. A version whose file is not what was announced (WeightsError) changes nothing: the engine keeps what it had.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

from libra.errors import EngineError, LibraError, ModelError, WeightsError
from libra.projections import project_tensors
from libra.rollout import ReadsColumns, RolloutEngine
from libra.tensors import digest
from libra.types import TurnOutput, TurnRequest
from libra.weights import (
    Answers,
    Calibration,
    Expected,
    Verdict,
    VersionCheck,
    WeightStore,
    WeightVersion,
    as_first,
    calibrate,
    expected_columns,
    judge,
    uncalibrated,
)

logger = logging.getLogger(__name__)

Build = Callable[[Path, int], RolloutEngine]
"""Makes an engine, not started, that serves a directory in Hugging Face layout as a version."""
Newest = Callable[[], Awaitable[WeightVersion | None]]
"""The newest version, on this machine; None where nothing is published yet."""
Tell = Callable[..., None]
"""Reports to the plugin: kind, then fields."""

NOT_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt")
"""Endings of files of a model that a version replaces."""
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
        self.calibration: Calibration | None = None
        self.out: EngineError | None = None
        self.quarantines = 0
        self._loading = asyncio.Lock()
        self._links: list[tempfile.TemporaryDirectory[str]] = []

    async def start(self) -> None:
        """Start the engine at version 0; ModelError where it cannot be served."""
        await self.engine.start()

    async def close(self) -> None:
        """Close the engine; pending requests fail."""
        await self.engine.close()
        for links in self._links:
            links.cleanup()

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """One turn by the newest version, all of whose tokens come from versions that passed their check.

        Raises
        ------
        EngineError
            The engine failed, or is out.
        """
        for _ in range(TRIES):
            await self.pull()
            seen = self.quarantines
            try:
                output = await self.engine.generate(request)
            except EngineError:
                if self.quarantines == seen:
                    raise
                logger.info("quarantine: %s is generated again", request.trajectory_id)
                continue
            if not self._unchecked(output):
                return output
            async with self._loading:  # the verdict on the version that was loaded in mid-turn
                if self.quarantines == seen and not self._unchecked(output):
                    return output
        raise self.out or EngineError(f"{request.trajectory_id}: {TRIES} engines were quarantined under one turn")

    def _unchecked(self, output: TurnOutput) -> bool:
        newest = max(output.weight_versions.max(initial=-1), output.kv_versions.max(initial=-1))
        return self.verified is None or int(newest) > self.verified

    async def pull(self) -> None:
        """Bring the engine to the newest version, where it has not shown to hold that already.

        Raises
        ------
        EngineError
            The engine is out.
        WeightsError
            The version cannot be read.
        """
        if self.out is None and self.verified is not None and self.announced <= self.verified:
            return
        async with self._loading:
            if self.out is not None:
                raise self.out
            newest = await self._newest()
            if newest is not None and (self.verified is None or newest.number > self.verified):
                await self._take(newest)

    async def _take(self, version: WeightVersion) -> None:
        started_s = time.perf_counter()
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
        if not verdict.passed:
            self._quarantine(version, verdict, out=False)
            prepared_s = loading_s = time.perf_counter()
            verdict = await self._again(check, version, wanted, expected)
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
        self._tell_served(version, verdict, load_s, now_s - started_s - load_s, now_s - prepared_s)

    async def _again(
        self, check: VersionCheck, version: WeightVersion, wanted: dict[str, tuple[int, ...]], expected: Expected
    ) -> Verdict:
        """Start an engine from nothing but the version's own files, and ask it."""
        await self.engine.close()
        self._links.append(tempfile.TemporaryDirectory(prefix="libra-engine-", dir=self._scratch))
        directory = Path(self._links[-1].name)
        link_model(self.model_dir, version, directory)
        self.engine = self._build(directory, version.number)
        try:
            async with self._one_model:
                await self.engine.start()
            allowed = self.calibration or uncalibrated(check.dtype)
            return judge(check, expected, await self._ask(check, wanted), allowed)
        except (EngineError, ModelError) as error:
            return _no_answer(check, error)

    async def _calibrate(self, check: VersionCheck) -> Calibration:
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
    ) -> tuple[dict[str, tuple[int, ...]], Expected]:
        if not isinstance(self.engine, ReadsColumns):
            return {}, Expected()
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

    def _quarantine(self, version: WeightVersion, verdict: Verdict, *, out: bool) -> None:
        self.quarantines += 1
        logger.error(
            "engine disagrees with version %d: %s: %s; %s", version.number, verdict.layer, verdict.detail,
            "it stays out" if out else "it is closed and started from that version's file",
        )  # fmt: skip
        self._tell(
            "quarantined",
            version=version.number,
            layer=verdict.layer,
            method=verdict.method,
            gap=verdict.gap if math.isfinite(verdict.gap) else None,
            tolerance=verdict.tolerance,
            detail=verdict.detail,
            out=out,
        )

    def _tell_served(
        self, version: WeightVersion, verdict: Verdict, load_s: float, check_s: float, stopped_s: float
    ) -> None:
        self._tell(
            "served",
            version=version.number,
            load_s=round(load_s, 6),
            check={
                "method": verdict.method,
                "gap": verdict.gap,
                "tolerance": verdict.tolerance,
                "moved_nats": verdict.moved_nats,
                "layers": verdict.num_layers,
                "changed_layers": verdict.num_changed,
                "smallest_change": verdict.smallest_change,
                "measured": self.calibration is not None and self.calibration.measured,
                "check_s": round(check_s, 6),
                "stopped_s": round(stopped_s, 6),
            },
        )


def link_model(model_dir: Path, version: WeightVersion, directory: Path) -> None:
    """Fill ``directory`` with links: everything of a model but its weights, and the weights of a version."""
    for path in Path(model_dir).iterdir():
        if not path.name.endswith(NOT_WEIGHTS):
            (directory / path.name).symlink_to(path.resolve())
    (directory / version.path.name).symlink_to(version.path.resolve())


def _no_answer(check: VersionCheck, error: LibraError) -> Verdict:
    return Verdict(
        False, "probe", "(all)", math.inf, 0.0, None, len(check.projections), None, 0.0, f"the engine failed: {error}"
    )
