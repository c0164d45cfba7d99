"""A run that starts on a cluster where the one before is still being cleared away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

from libra.cluster.present_workers import present_workers
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.errors import ClusterError
from libra.scheduler import LibraPlugin
from libra.worker import host

Config = Callable[..., RunConfig]


def test_workers_are_found_whatever_dask_asks_of_the_scheduler_at_that_moment(
    make_config: Config, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = Client.sync

    def sync_and_refresh(client: Client, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What Dask does every 2 s, between an answer and the moment at which its caller goes on."""
        answer = sync(client, func, *args, **kwargs)
        sync(client, client._update_scheduler_info)
        return answer

    monkeypatch.setattr(Client, "sync", sync_and_refresh)
    assert client.scheduler_info(n_workers=-1)["workers"] == {}  # so it was read, and so it still is
    assert sorted(worker["name"] for worker in present_workers(client).values()) == [
        "rollout-0", "tool-0", "train-0",
    ]  # fmt: skip
    check_cluster(client, make_config())


def test_a_worker_that_has_just_left_is_awaited_and_one_that_stays_away_is_named(
    make_config: Config, client: Client, until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    client.register_plugin(LibraPlugin())
    before = {worker["name"]: address for address, worker in present_workers(client).items()}
    cluster: Any = client.cluster
    os.kill(cluster.workers["rollout-0"].pid, signal.SIGKILL)
    until(cluster, lambda scheduler: all(ws.name != "rollout-0" for ws in scheduler.workers.values()))
    with pytest.raises(ClusterError, match="no worker supplies ROLLOUT"):
        check_cluster(client, make_config(), wait_s=0)
    check_cluster(client, make_config())
    (line,) = (record.getMessage() for record in caplog.records if record.name == "libra.cluster.readiness")
    assert "waiting for rollout-0 to come back" in line
    after = {worker["name"]: address for address, worker in present_workers(client).items()}
    assert after.keys() == before.keys() and after["rollout-0"] != before["rollout-0"]


class Stand:
    """Stands for a Dask worker."""

    name, address = "train-0", "tcp://10.0.0.1:1"


def test_a_workers_part_of_a_run_is_built_when_that_of_the_run_before_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> list[str]:
        order: list[str] = []
        gate, worker = asyncio.Event(), Stand()

        async def clear() -> None:
            await gate.wait()  # a process group that takes its time to close
            order.append("cleared")

        async def build(self: host.LibraHost, worker: Any) -> None:
            order.append("built")
            self.context = SimpleNamespace(report=lambda said: None, name="", address="")  # type: ignore[assignment]

        monkeypatch.setattr(host, "heartbeat_during_setup", lambda worker: contextlib.nullcontext())
        monkeypatch.setattr(host.LibraHost, "_build", build)
        first, second = (host.LibraHost(SimpleNamespace(run=run)) for run in ("first", "second"))  # type: ignore[arg-type]
        await first.setup(worker)
        first._parts.push_async_callback(clear)
        clearing = asyncio.ensure_future(first.teardown(worker))
        await asyncio.sleep(0)  # it has begun
        building = asyncio.ensure_future(second.setup(worker))
        for _ in range(10):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(clearing, building)
        return order

    assert asyncio.run(test()) == ["built", "cleared", "built"]
