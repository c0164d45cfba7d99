"""The cluster of processes on one machine: it gives up none of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler

from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session


def process(scheduler: Scheduler, name: str) -> int | None:
    """Process id of the worker of that name; None where there is none."""
    return next((ws.pid for ws in scheduler.workers.values() if ws.name == name), None)


@pytest.mark.timeout(90)
def test_a_worker_comes_back_though_it_was_lost_for_longer_than_dask_waits(
    until: Callable[[Any, Callable[[Scheduler], bool]], None],
) -> None:
    config = config_from_dict({"cluster": {"dashboard_port": 0, "threads": 1}})
    with local_cluster(config) as cluster, Client(cluster) as client:
        first = process(cluster.scheduler, "tool-0")
        assert first is not None
        with dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}):
            os.kill(first, signal.SIGKILL)
            until(cluster, lambda it: process(it, "tool-0") not in (None, first))
        again = process(cluster.scheduler, "tool-0")
        (address,) = (ws.address for ws in cluster.scheduler.workers.values() if ws.name == "tool-0")
        assert client.run(os.getpid, workers=[address]) == {address: again}
        assert set(cluster.workers) == {"rollout-0", "tool-0", "train-0"}


def test_a_nanny_that_ends_is_replaced_and_the_run_goes_on(
    make_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker ends with it; the step that it had is taken by the next one."""
    with Session(make_config(run={"iterations": 3})) as session:
        iterations = session.iterations()
        next(iterations)
        cluster = session.cluster
        assert cluster is not None
        nanny, first = cluster.workers["train-0"], process(cluster.scheduler, "train-0")
        cluster.sync(nanny.close)
        assert [values["iteration"] for values in iterations] == [1, 2]
        assert cluster.workers["train-0"] is not nanny
        assert process(cluster.scheduler, "train-0") not in (None, first)
    assert "the nanny of worker train-0 has ended; another is started in 0 s" in caplog.text
