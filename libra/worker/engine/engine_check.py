"""Queries an engine's layers and log-probabilities, and compares them with a version's check."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import LibraError, WeightsError
from libra.projections import project_tensors
from libra.rollout import ReadsColumns, RolloutEngine
from libra.tensors import digest
from libra.weights import WeightStore, WeightVersion
from libra.weights.version_check import (
    Answers,
    CheckVerdict,
    ExpectedProbes,
    ProbeCalibration,
    VersionCheck,
    as_first,
    calibrate,
    expected_columns,
    judge,
    uncalibrated,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions about a version: its check, ``columns`` to read by layer, and expected values."""

    version: WeightVersion
    check: VersionCheck
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expected: ExpectedProbes = field(default_factory=ExpectedProbes)


class EngineCheck:
    """The check of one worker's engines; tolerances are None until measured."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.calibration: ProbeCalibration | None = None

    async def questions(self, engine: RolloutEngine, version: WeightVersion, before: Iterable[int]) -> Questions:
        """Questions for an engine that may still hold a version of ``before``.

        Raises WeightsError if the file differs from the trainer's digest.
        """
        check = await asyncio.to_thread(self._published, version)
        reads = isinstance(engine, ReadsColumns)
        columns, _ = await asyncio.gather(
            asyncio.to_thread(self._columns, version, check, before if reads else None),
            asyncio.to_thread(self._verify_file, version, check),
        )
        return Questions(version, check, *columns)

    def _published(self, version: WeightVersion) -> VersionCheck:
        text = self.store.check_text(version.number)
        if text is not None:
            return VersionCheck.from_json(text, version.directory)
        tensors = self.store.read(version)
        kind = next(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.ndim == 2)
        projections = project_tensors(tensors, version.number)
        return VersionCheck(version.number, version.digest, kind, version.number, projections)

    def _columns(self, version: WeightVersion, check: VersionCheck, before: Iterable[int] | None) -> tuple[Any, ...]:
        if before is None:
            return ()
        held = [self.store.directory(number) / version.path.name for number in before if number >= 0]
        tied, dtype = self.store.manifest(version.number).tied, getattr(torch, check.dtype)
        return expected_columns(version.path, held, tied, dtype, seed=version.number)

    def _verify_file(self, version: WeightVersion, check: VersionCheck) -> None:
        got = digest(self.store.read(version, verify=False))
        if got != check.digest:
            raise WeightsError(
                f"weights: {version.path} has digest {got}, its check has {check.digest}; the file was altered"
            )

    async def calibrate(self, engine: RolloutEngine, check: VersionCheck) -> None:
        """Measure missing tolerances at version 0; use the widest if the engine has moved on."""
        if self.calibration is not None:
            return
        first = check if check.version == 0 else as_first(check)
        if engine.version != 0 or first is None:
            logger.warning("weights: version 0 can no longer be compared; tolerances are the widest allowed")
            self.calibration = uncalibrated(check.dtype)
        else:
            self.calibration = calibrate(first, await _answers(engine, first, {}))

    async def verdict(self, engine: RolloutEngine, questions: Questions) -> CheckVerdict:
        """Whether the engine holds the version; missing tolerances are measured if it passes."""
        check = questions.check
        answers = await _answers(engine, check, questions.columns)
        verdict = judge(check, questions.expected, answers, self.calibration or uncalibrated(check.dtype))
        if verdict.passed and self.calibration is None:
            self.calibration = calibrate(check, answers)
        return verdict


def no_answer(check: VersionCheck, error: LibraError) -> CheckVerdict:
    detail, layers = f"the engine failed: {error}", len(check.projections)
    return CheckVerdict(False, "probe", "(all)", math.inf, 0.0, None, layers, None, 0.0, detail)


async def _answers(engine: RolloutEngine, check: VersionCheck, columns: dict[str, tuple[int, ...]]) -> Answers:
    async def layers() -> tuple[dict[str, tuple[float, ...]], dict[str, NDArray[np.float32]]]:
        read = await engine.columns(columns) if columns and isinstance(engine, ReadsColumns) else {}
        return await engine.project(check.seed) if check.projections else {}, read

    async def probe() -> tuple[NDArray[np.float32], ...]:
        return tuple([await engine.score(np.array(row, np.int32)) for row in check.probe])

    (projections, read), logp = await asyncio.gather(layers(), probe())
    return Answers(logp, projections, read)
