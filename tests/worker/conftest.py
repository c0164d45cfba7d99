"""Makers of a trainer and of workers that serve its versions."""

import pytest
from coroutine_tests import pytest_pyfunc_call  # noqa: F401

from checked_engines import CONTEXT, Counted, Faulty, Trainer, Worker


@pytest.fixture
def trainer(random_model, tmp_path):
    return lambda dtype: Trainer(random_model, tmp_path / "weights", dtype)


@pytest.fixture
def worker(random_model):
    """``worker(trainer, *faults)``: its n-th engine has the n-th fault, None or no entry: it has none."""

    def make(trainer, *faults):
        built = iter([*faults])

        def build(directory, version):
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
