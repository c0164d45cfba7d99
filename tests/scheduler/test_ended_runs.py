"""What is left of a run on its scheduler when it has ended, or its driver has gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from libra.scheduler.gang_plugin import GangPlugin
from libra.store.event_log import read_events


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
