"""A run whose stale tokens are scored under the weights that sampled them, before and after its trainer is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

from distributed import Client

from libra.cluster.present_workers import present_workers
from libra.config import RunConfig
from libra.driver.session import Session
from libra.weights import WeightStore
from libra.worker.checkpoint_writer import CheckpointWriter
from libra.worker.replica_factory import make_replica
from libra.worker.trainer import recover


def dies_after_the_old_policies(run: str, dask_worker: Any) -> None:
    """From now on the trainer is killed in a step whose tokens have been scored under their versions."""
    gradient = dask_worker.plugins[f"libra-{run}"].trainer.replica.gradient
    gradient.accumulate = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


def test_every_token_is_exact_and_a_killed_trainer_takes_the_same_steps_again(
    make_config: Callable[..., RunConfig], client: Client
) -> None:
    config = make_config(
        run={"iterations": 7, "eta": 3},
        trainer={"old_logp": "version", "correction": "truncate", "lr": 1e-3},
        checkpoint={"every": 4},
        store={"keep_versions": 1},
    )
    with Session(config, client=client) as session:
        iterations = session.iterations()
        rows = [next(iterations) for _ in range(6)]
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"].startswith("train"))
        session.client.run(dies_after_the_old_policies, run=session.spec.run, workers=[address])
        rows += iterations
    assert [row["iteration"] for row in rows] == list(range(7))
    assert max(row["lag_max"] for row in rows) > 0
    scored = [row for row in rows if row["forwarded_tokens"]]
    assert scored and all(row["exact_old_frac"] == 1.0 for row in scored)
    spec, store = session.spec, WeightStore(session.spec.weights_dir)
    assert store.numbers()[-7:] == list(range(1, 8))  # eta versions before the checkpoint of 4 steps, and all since
    shutil.rmtree(spec.checkpoints_dir / "step-000007")
    replica = make_replica(spec, spec.model_dir, None)
    replica.published = store.read
    again = recover(CheckpointWriter(replica, spec.checkpoints_dir, config), spec, store, 7)
    assert [step["step"] for step in again] == [4, 5, 6]
    assert [step["digest"] for step in again] == [store.get(number).digest for number in (5, 6, 7)]
