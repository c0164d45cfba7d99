"""Makers of a trainer and of workers that serve its versions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from checked_engines import CONTEXT, Counted, Faulty, Trainer, Worker
from libra.rollout import TransformersEngine


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, and close their fixtures that have `aclose`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        try:
            await pyfuncitem.obj(**given)
        finally:
            for each in given.values():
                if hasattr(each, "aclose"):
                    await each.aclose()

    asyncio.run(run())
    return True


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
            limits = {"slots": 4, "max_context_tokens": CONTEXT, "threads": 1, "host_kv_gib": 0.01}
            engine = kind(directory, dtype=dtype, version=version, **limits)
            if fault is not None:
                engine.fault = fault
            return engine

        return Worker(trainer, random_model, build)

    return make
