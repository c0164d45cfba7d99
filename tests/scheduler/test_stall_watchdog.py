"""Workers of their own process that really hang: named, their stacks written, restarted, and the run goes on."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import threading
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, Nanny, Scheduler
from distributed.diagnostics.plugin import WorkerPlugin

from libra import keys
from libra.cluster import worker_process
from libra.cluster.settings import DASK_SETTINGS
from libra.scheduler import LibraPlugin, RunRegistration
from libra.store.event_log import read_events

KEY = keys.make("trajectory", (0, 0, 0), epoch=0, run="demo")


class Stacks(WorkerPlugin):
    """What `WorkerRuntime` does first."""

    def setup(self, worker):
        worker_process.install_stacks(worker)


def quantum(blocks):
    """A trajectory of one quantum that hangs the first time it runs; travels to the workers by value."""

    async def run(marker):
        from distributed import get_worker

        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            from libra.facts import STREAM_OP, QuantumFinished, pack
            from libra.types import Phase

            finished = QuantumFinished("trajectory-train-0-0-0-e0-demo", Phase.ROLLOUT, 1, "", "", 1.0, end="answered")
            get_worker().batched_send({"op": STREAM_OP, "run": "demo", "epoch": 0, "packed": pack([finished])})
            return "answered"
        match blocks:
            case "event loop":
                threading.Event().wait()
            case "coroutine":
                await asyncio.Event().wait()
            case "process":
                os.kill(os.getpid(), signal.SIGSTOP)
        return "never"

    return run


@contextlib.asynccontextmanager
async def processes():
    with dask.config.set(DASK_SETTINGS):
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
            Nanny(
                scheduler.address,
                nthreads=4,
                name="rollout-0",
                resources={"ROLLOUT": 1},
                memory_limit=0,
                dashboard=False,
            ),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.register_plugin(LibraPlugin())
            await client.register_plugin(Stacks())
            yield SimpleNamespace(scheduler=scheduler, client=client, plugin=scheduler.plugins[LibraPlugin.name])


def stalls(directory):
    return [event for event in read_events(directory / "events.jsonl").events if event["name"] == "stall_detected"]


@pytest.mark.live
@pytest.mark.parametrize(("blocks", "seen"), [
    ("event loop", r"written by faulthandler(.|\n)*threading\.py.* in wait"),
    ("coroutine", r"Coroutine (.|\n)*test_stall_watchdog\.py.* in run(.|\n)*locks\.py"),
    ("process", r"it is stopped; kill -CONT \d+"),
])  # fmt: skip
async def test_a_hanging_worker_is_named_restarted_and_the_trajectory_ends(emulation, blocks, seen, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "libra.scheduler.stall_watchdog")
    async with processes() as live:
        config = emulation.config_of(timeout_s=1.0, restart=True)
        live.plugin.register_run(RunRegistration("demo", 0, str(tmp_path), config))
        task = live.client.submit(quantum(blocks), str(tmp_path / "marker"), key=KEY, resources={keys.PARK: 1})
        assert await task == "answered"
        live.plugin.end_run("demo")
    first = stalls(tmp_path)[0]
    assert (first["key"], first["worker"], first["stage"]) == (KEY, "rollout-0", "trajectory, ROLLOUT")
    assert first["restarts"] and first["idle_s"] >= 1.0 and first["last_event"].startswith("quantum_dispatched")
    assert re.search(seen, (tmp_path / first["stacks"]).read_text()), (tmp_path / first["stacks"]).read_text()
    events = [event["name"] for event in read_events(tmp_path / "events.jsonl").events]
    assert events.count("quantum_lost") == 1 and events.count("quantum_dispatched") == 2
    assert events.count("quantum_finished") == 1
    warnings = [record.getMessage() for record in caplog.records if record.name == "libra.scheduler.stall_watchdog"]
    assert KEY in warnings[0] and "run demo: worker rollout-0 was restarted: OK" in warnings


async def test_without_restart_a_task_that_hangs_is_named_and_left_alone(emulation, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "libra.scheduler.stall_watchdog")
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path, config=emulation.config_of(timeout_s=1.0))
        task = live.client.submit(asyncio.Event().wait, key=KEY, resources={keys.PARK: 1})
        await emulation.until(lambda: "no progress" in caplog.text)
        live.plugin.end_run("demo")
        await task.cancel()
    (event,) = stalls(tmp_path)
    assert (event["key"], event["worker"], event["restarts"]) == (KEY, "rollout-0", False)
    assert "watchdog.restart=true" in caplog.text


async def test_limits_follow_what_the_runs_own_tasks_take(emulation, tmp_path):
    async with emulation.cluster() as live:
        floors_s = {"trajectory, TOOL": 95.0}
        emulation.register(live, tmp_path, config=emulation.config_of(timeout_s="auto"), watchdog_floors_s=floors_s)
        limits = live.plugin.guards["demo"].watchdog.limits
        assert limits.limit_s("trajectory, TOOL") == limits.limit_s("trajectory, ROLLOUT") == 600.0
        await asyncio.gather(*emulation.submit(live, "demo", [6, 6]))  # three generations and three actions each
        assert (limits.limit_s("trajectory, TOOL"), limits.limit_s("trajectory, ROLLOUT")) == (95.0, 60.0)
        assert await live.client.submit(str, 1, key="step-train-0-e0-demo") == "1"
        assert limits.limit_s("step") == 600.0  # once is not enough
        emulation.register(live, tmp_path, config=emulation.config_of(timeout_s=7.0), epoch=1)
        assert live.plugin.guards["demo"].watchdog.limits.limit_s("step") == 7.0


async def test_where_nothing_runs_the_line_says_which_worker_to_start(emulation, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "libra.scheduler.stall_watchdog")
    async with emulation.cluster(rollout=0) as live:
        emulation.register(live, tmp_path, config=emulation.config_of(timeout_s=1.0))
        futures = emulation.submit(live, "demo", [1, 1])
        gate = live.client.submit(int, 5, key=keys.make("gate", (5,), epoch=0, run="demo"), resources={keys.PARK: 1})
        await emulation.until(lambda: "nothing runs" in caplog.text)
        live.plugin.end_run("demo")
        del futures, gate  # held until here, or they would have been forgotten
        address = str(live.scheduler.address)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "libra.scheduler.stall_watchdog"]
    assert "2 for a slot of ROLLOUT, which no worker declares" in warning and "1 for version 5" in warning
    assert f"type dask worker {address} --nthreads 72 --resources ROLLOUT=64" in warning
    (event,) = stalls(tmp_path)
    assert (event["key"], event["worker"], event["parked"], event["stacks"]) == ("", "", 3, "")


def test_a_signal_is_never_sent_to_a_process_that_does_not_hold_the_file_open(tmp_path):
    (tmp_path / worker_process.STACKS_FILE).touch()
    assert not worker_process._holds_open(os.getpid(), tmp_path / worker_process.STACKS_FILE)
    with (tmp_path / worker_process.STACKS_FILE).open():
        assert worker_process._holds_open(os.getpid(), tmp_path / worker_process.STACKS_FILE)
    assert not worker_process._holds_open(2**22 + 1, tmp_path / worker_process.STACKS_FILE)
