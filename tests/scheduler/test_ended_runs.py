"""What is left of a run on its scheduler when it has ended, or its driver has gone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker, WorkerPlugin

from libra import events
from libra.keys import host_name
from libra.scheduler import RunRegistration
from libra.scheduler.gang_plugin import GangPlugin
from libra.scheduler.run_log import RunLog
from libra.store import event_log, log_segments
from libra.store.event_log import EventLog, read_events
from libra.store.log_segments import Segment, segments_of


def test_a_run_whose_driver_leaves_makes_room_for_the_next_and_one_that_was_resumed_meanwhile_goes_on(
    emulation: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with emulation.cluster() as live:
            await live.client.register_plugin(GangPlugin())
            gangs = live.scheduler.plugins["libra-gang"]
            async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
                emulation.register(live, tmp_path, client=driver.id)
                assert gangs.register_gang("demo", 0, 2) == {}
                assert "'demo' trains on several replicas" in gangs.register_gang("next", 0, 2)["error"]
            while "demo" in live.plugin.runs:  # noqa: ASYNC110  the scheduler learns of it a moment later
                await asyncio.sleep(0)
            assert gangs.register_gang("next", 0, 2) == {}
            assert f"type libra resume {tmp_path}" in caplog.text

            async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
                emulation.register(live, tmp_path, epoch=1, client=driver.id)
                emulation.register(live, tmp_path, epoch=2, client=live.client.id)
                left = driver.id
            while left in live.scheduler.clients:  # noqa: ASYNC110
                await asyncio.sleep(0)
            live.plugin.end_run("demo", 1)  # what the driver of that start says at last
            assert live.plugin.runs["demo"].epoch == 2

    with caplog.at_level("WARNING", "libra.scheduler.plugin"):
        asyncio.run(test())
    starts = [e["epoch"] for e in read_events(tmp_path / "events.jsonl").events if e["name"] == "run_started"]
    assert starts == [0, 1, 2]


class Part(WorkerPlugin):
    """Stands for a run's part on a worker; its end waits for ``gate``."""

    gate: asyncio.Event
    order: list[str]

    def __init__(self, start: str) -> None:
        self.name, self.start = host_name("demo"), start

    def setup(self, worker: Worker) -> None:
        self.order.append(f"{self.start} begins on {worker.name}")

    async def teardown(self, worker: Worker) -> None:
        await self.gate.wait()
        self.order.append(f"{self.start} ends on {worker.name}")


def registration(directory: Path, client: Client, epoch: int) -> dict[str, Any]:
    """What a driver sends."""
    return RunRegistration(
        "demo", epoch, str(directory), eta=0, iterations=1, groups_per_batch=1, event_log=True, client=client.id
    ).as_message()


def test_a_killed_drivers_run_leaves_its_workers_before_its_next_start_comes_to_them(
    emulation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> list[str]:
        order: list[str] = []
        monkeypatch.setattr(Part, "order", order, raising=False)
        monkeypatch.setattr(Part, "gate", asyncio.Event(), raising=False)
        async with emulation.cluster() as live:
            async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
                rpc: Any = driver.scheduler
                assert "error" not in await rpc.libra_register_run(registration=registration(tmp_path, driver, 0))
                await driver.register_plugin(Part("first"))
                async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as reader:
                    left = reader.id
                while left in live.scheduler.clients:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert host_name("demo") in live.scheduler.worker_plugins, "another client is not the driver"
            while "demo" in live.plugin.runs:  # noqa: ASYNC110
                await asyncio.sleep(0)
            rpc = live.client.scheduler
            again = asyncio.ensure_future(rpc.libra_register_run(registration=registration(tmp_path, live.client, 1)))
            while live.plugin.ended._removals and host_name("demo") in live.scheduler.worker_plugins:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert host_name("demo") not in live.scheduler.worker_plugins, "nor does a worker that joins get it"
            assert not again.done() and "demo" not in live.plugin.runs
            Part.gate.set()
            assert "error" not in await again
            await live.client.register_plugin(Part("second"))
            live.plugin.end_run("demo", 1)
        return order

    order = asyncio.run(test())
    workers = ("rollout-0", "tool-0")
    assert sorted(order[:2]) == sorted(f"first begins on {name}" for name in workers)
    assert sorted(order[2:4]) == sorted(f"first ends on {name}" for name in workers)
    assert sorted(order[4:6]) == sorted(f"second begins on {name}" for name in workers)


def test_a_driver_that_has_gone_before_its_log_was_open_leaves_no_run(emulation: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with emulation.cluster() as live:
            async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
                message = registration(tmp_path, driver, 0)
                gone = driver.id
            while gone in live.scheduler.clients:  # noqa: ASYNC110
                await asyncio.sleep(0)
            answer = await live.client.scheduler.libra_register_run(registration=message)
            assert answer == {"error": "the driver of run 'demo' has left"} and not live.plugin.runs

    asyncio.run(test())


def test_a_large_log_is_counted_and_compressed_off_the_event_loop(
    emulation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, counted, gate = tmp_path / "events.jsonl", list[threading.Thread](), threading.Event()
    with EventLog(log) as old:  # of an older Libra, which kept one file
        for _ in range(100):
            old.write_line('{"name": "old", "t_s": 0.0}')
    count, compress = log_segments._count_lines, Segment.compress

    def counts(path: Path) -> int:
        counted.append(threading.current_thread())
        return count(path)

    def compresses(segment: Segment) -> None:
        assert gate.wait(60)
        compress(segment)

    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(log_segments, "_count_lines", counts)
    monkeypatch.setattr(Segment, "compress", compresses)

    async def test() -> None:
        async with emulation.cluster() as live:
            message = registration(tmp_path, live.client, 1)
            try:
                assert "error" not in await live.client.scheduler.libra_register_run(registration=message)
                assert len(counted) == 1 and counted[0] is not threading.main_thread()
                await live.client.scheduler.libra_end_run(run="demo", epoch=1)  # and the compression still waits
                (segment,) = segments_of(log)
                assert segment.plain.exists() and segment.last == 100
            finally:
                gate.set()

    asyncio.run(test())
    (segment,) = segments_of(log)
    assert segment.packed.exists() and not segment.plain.exists(), "a scheduler that stops waits for it"
    names = [event["name"] for event in read_events(log).events]
    assert names[:102] == [*["old"] * 100, "run_started", "policy_snapshot"]


def test_the_log_of_an_ended_run_is_compressed_to_its_last_line_and_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def part(first: int, last: int) -> None:
        log = RunLog("demo", EventLog(path))
        for number in range(first, last):
            log.emit(events.PolicyLearned, seconds=float(number))
        log.close()
        log.wait_compressed()

    part(0, 20_000)  # two megabytes
    assert path.read_bytes() == b"" and [segment.last for segment in segments_of(path)] == [20_000]
    assert sum(segment.packed.stat().st_size for segment in segments_of(path)) < 200_000
    part(20_000, 20_003)
    assert len(path.read_bytes().splitlines()) == 3, "a few lines stay as they are"
    assert [event["seconds"] for event in read_events(path).events] == [float(number) for number in range(20_003)]
