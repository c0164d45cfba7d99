"""The cluster of processes on one machine: it gives up none of them, and a run that starts waits for those that come back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler
from live_runs import kill

from libra.cluster.present_workers import present_workers
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.driver.session import Session
from libra.errors import ClusterError
from libra.scheduler import LibraPlugin

Config = Callable[..., RunConfig]
Until = Callable[[Any, Callable[[Scheduler], bool]], None]


def process(scheduler: Scheduler, name: str) -> int | None:
    """Process id of the worker of that name; None where there is none."""
    return next((ws.pid for ws in scheduler.workers.values() if ws.name == name), None)


def test_a_lost_worker_comes_back_however_long_dask_waits_and_a_run_that_starts_waits_for_it(
    make_config: Config, client: Client, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    client.register_plugin(LibraPlugin())
    before = {worker["name"]: address for address, worker in present_workers(client).items()}
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}):
        kill(client, "rollout-0", until)
        with pytest.raises(ClusterError, match="ROLLOUT"):
            check_cluster(client, make_config(), wait_s=0)
        check_cluster(client, make_config())
    assert "waiting for rollout-0 to come back" in caplog.text
    after = {worker["name"]: address for address, worker in present_workers(client).items()}
    assert after.keys() == before.keys() == {"rollout-0", "tool-0", "train-0"}
    assert after["rollout-0"] != before["rollout-0"]
    asked = client.run(os.getpid, workers=[after["rollout-0"]])
    assert asked == {after["rollout-0"]: process(client.cluster.scheduler, "rollout-0")}


def test_a_nanny_that_ends_is_replaced_and_the_run_goes_on(
    make_config: Config, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker ends with it; the step that it had is taken by the next one."""
    cluster: Any = client.cluster
    with Session(make_config(run={"iterations": 3}), client=client) as session:
        iterations = session.iterations()
        next(iterations)
        nanny, first = cluster.workers["train-0"], process(cluster.scheduler, "train-0")
        cluster.sync(nanny.close)
        assert [values["iteration"] for values in iterations] == [1, 2]
    assert cluster.workers["train-0"] is not nanny
    assert process(cluster.scheduler, "train-0") not in (None, first)
    assert "the nanny of worker train-0 has ended" in caplog.text
