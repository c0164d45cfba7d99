"""Makers of a trainer and of workers that serve its versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checked_engines import CONTEXT, Counted, Faulty, Trainer, Worker
from libra.rollout import TransformersEngine


@pytest.fixture
def trainer(random_model, tmp_path) -> Callable[[str], Trainer]:
    return lambda dtype: Trainer(random_model, tmp_path / "weights", dtype)


@pytest.fixture
def worker(random_model) -> Callable[..., Worker]:
    """``worker(trainer, *faults)``: its n-th engine has the n-th fault, None or no entry: it has none."""

    def make(trainer: Trainer, *faults: Callable[..., None] | None) -> Worker:
        built = iter([*faults])

        def build(directory: Path, version: int) -> TransformersEngine:
            fault = next(built, None)
            dtype = str(trainer.replica.dtype).removeprefix("torch.")
            kind = Counted if fault is None else Faulty
            engine = kind(
                directory,
                slots=4,
                max_context_tokens=CONTEXT,
                dtype=dtype,
                threads=1,
                version=version,
                host_kv_gib=0.01,
            )
            if fault is not None:
                engine.fault = fault
            return engine

        return Worker(trainer, random_model, build)

    return make
