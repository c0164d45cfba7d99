"""A resource that nobody has: told once, again where the cause changes or much time has passed, and when it is there again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Worker

from libra import keys
from libra.scheduler import lost_workers
from libra.scheduler.lost_workers import LostWorkers
from libra.scheduler.missing_roles import REMIND_S, START_S, TELL_AFTER_S, MissingRoles


def test_the_names_of_lost_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_workers, "KEPT", 3)
    lost = LostWorkers(SimpleNamespace(workers={}))  # type: ignore[arg-type]
    for name in ("a", "b", "a", "c", "d"):
        lost.joined(name, f"tcp://{name}")
        lost.left(f"tcp://{name}")
    assert lost.gone() == ["a", "c", "d"]  # b left before a did for the second time
    lost.joined("c", "tcp://c2")
    assert lost.gone() == ["a", "d"]


def test_one_look_copies_nothing_per_worker(emulation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with emulation.cluster() as live:
            live.scheduler.periodic_callbacks["libra-sample"].stop()
            emulation.register(live, tmp_path)
            plugin = live.plugin
            address = live.workers[1].address
            plugin.not_ready.joined("demo", address)
            assert plugin.not_ready.held_of(address) == {keys.COMMIT: 1} and plugin.not_ready.held_of("other") == {}
            monkeypatch.setattr(plugin.not_ready, "held", None)
            plugin.missing_roles.look(plugin.runs["demo"], 0.0)
            plugin.missing_roles.look(plugin.runs["demo"], START_S)
            (told,) = (text for _, text in plugin.notices("demo", 0, 0) if "COMMIT" in text)
            assert "worker tool-0 (process" in told

    asyncio.run(test())


async def until(condition: Any) -> None:
    """Let the event loop go on until something is true."""
    while not condition():  # noqa: ASYNC110  no event for all of these
        await asyncio.sleep(0)


def test_what_is_told_when_workers_leave_come_back_and_are_set_up(emulation: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with emulation.cluster() as live:
            live.scheduler.periodic_callbacks["libra-sample"].stop()  # which looks by the true time
            emulation.register(live, tmp_path)
            plugin, state, read = live.plugin, live.plugin.runs["demo"], [0]
            missing = MissingRoles(live.scheduler, plugin.not_ready, plugin.lost_workers, plugin.trajectories.phase_of)
            plugin.missing_roles = missing

            def ready(worker: Worker) -> None:
                said = {"kind": "ready", "run": "demo", "epoch": 0, "name": worker.name, "address": worker.address}
                plugin.log_event("libra", said)

            def told(at_s: float) -> str:
                missing.look(state, at_s)
                new = plugin.notices("demo", 0, read[0])
                read[0] += len(new)
                return " | ".join(text for _, text in new)

            assert told(0.0) == told(TELL_AFTER_S - 0.1) == ""
            assert "TRAIN not there yet: no worker of this cluster has it; nothing waits for that yet" in told(
                TELL_AFTER_S
            )
            assert told(START_S - 0.1) == ""  # the others are being set up
            starting = told(START_S)
            assert "ROLLOUT, TOOL, GRADE, COMMIT not there yet: worker rollout-0 (process" in starting
            assert "worker tool-0 (process" in starting and "is being set up" in starting
            for worker in live.workers:
                ready(worker)
            assert "run demo: ROLLOUT, TOOL, GRADE, COMMIT is there after 24 s: rollout-0, tool-0" in told(24.0)

            key = keys.make("step", (0,), epoch=0, run="demo")
            step = live.client.submit(str, 1, key=key, resources={keys.TRAIN: 1})
            await until(lambda: key in live.scheduler.tasks and live.scheduler.tasks[key].state == "no-worker")
            late = told(10.0 + REMIND_S)
            assert (
                "TRAIN not there yet: no worker of this cluster has it; 1 of its tasks wait for that (step 1)" in late
            )
            assert f"type dask worker {live.scheduler.address} --nthreads 9 --resources TRAIN=1" in late
            assert f"Ctrl-C and libra resume {tmp_path}" in late

            await live.workers[1].close()
            await until(lambda: all(ws.name != "tool-0" for ws in live.scheduler.workers.values()))
            t_s = 400.0
            assert told(t_s) == told(t_s + TELL_AFTER_S - 0.1) == ""
            gone = told(t_s + TELL_AFTER_S)
            assert "for 6 s nobody runs tool calls, writes the store (TOOL, COMMIT): worker tool-0 has left" in gone
            assert "nothing waits for that yet" in gone
            supplies = {keys.TOOL: 2, keys.COMMIT: 1}
            async with Worker(live.scheduler.address, nthreads=4, name="tool-0", resources=supplies) as back:
                assert told(t_s + TELL_AFTER_S + 1.0) == ""  # it may be ready at once
                pid = live.scheduler.workers[back.address].pid
                assert f"worker tool-0 (process {pid} on" in told(t_s + 2 * TELL_AFTER_S)
                await until(lambda: live.scheduler.workers[back.address] in live.scheduler.running)
                ready(back)
                assert "TOOL, COMMIT is there again after 13 s: tool-0" in told(t_s + 2 * TELL_AFTER_S + 1.0)
                state.workers.quarantined.add(live.workers[0].address)
                told(500.0)
                told_of = told(506.0)
                assert "nobody generates (ROLLOUT): the engine of worker rollout-0 failed the version check" in told_of
                assert "its engine is started again from that version's file" in told_of
                assert plugin.progress("demo", 0)[2] == "nobody generates"
                state.workers.out.add(live.workers[0].address)
                assert told(507.0) == ""
                out = told(513.0)
                assert "for 13 s nobody generates (ROLLOUT): the engine of worker rollout-0 failed" in out
                assert f"mend the cause (its log says more), then type kill -9 {pid} and start it again; to stop" in out
                assert "dask worker" not in out and "nothing starts it again by itself" in out
            assert plugin.notices("demo", 1, 0) == plugin.notices("other", 0, 0) == []
            step.release()

    asyncio.run(test())
