"""The contract of `libra.worker.dask_worker` with Dask: what it changes and reads is there, and means what it says."""

import asyncio
import contextlib
from types import SimpleNamespace

import dask
import distributed.worker
import pytest
from distributed import Client, Reschedule, Scheduler, Worker, get_worker
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from libra.worker.dask_worker import (
    PEER_ERRORS,
    ask_worker,
    cheap_reschedule,
    heartbeat_during_setup,
    serve_worker,
    set_supply,
    still_wanted,
    stop_serving,
    takes,
)

STATE = {}
"""What the tasks below share with their test; functions of a module are not copied on their way to a worker here."""


@contextlib.asynccontextmanager
async def cluster(**resources):
    """A scheduler, a worker with these resources, and a client."""
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, name="own", nthreads=4, resources=resources) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        STATE.update(began=asyncio.Event(), go=asyncio.Event(), ended=asyncio.Event(), seen=[])
        yield SimpleNamespace(scheduler=scheduler, worker=worker, client=client)


async def until(condition):
    while not condition():  # noqa: ASYNC110  Dask has no events for these
        await asyncio.sleep(0)


async def holds():
    STATE["began"].set()
    await STATE["go"].wait()


async def at_the_third_time():
    STATE["seen"].append(1)
    if len(STATE["seen"]) < 3:
        raise Reschedule()
    return len(STATE["seen"])


async def fails():
    raise ValueError("of its own")


async def test_dask_reads_only_the_type_of_reschedule_and_a_task_that_fails_still_says_why():
    cheap_reschedule()
    light = distributed.worker.error_message(Reschedule())
    full = distributed.worker.error_message(ValueError("kept"))
    assert light.keys() == full.keys()
    assert light["exception"] is None and full["exception_text"] == "ValueError('kept')"
    async with cluster() as live:
        assert await live.client.submit(at_the_third_time, key="again") == 3
        error = await live.client.submit(fails, key="fails").exception()
        assert repr(error) == "ValueError('of its own')"


async def looks_twice():
    STATE["seen"].append(still_wanted(get_worker(), "task"))
    await holds()
    STATE["seen"].append(still_wanted(get_worker(), "task"))
    STATE["ended"].set()


async def test_a_running_task_is_wanted_until_it_is_cancelled():
    async with cluster() as live:
        future = live.client.submit(looks_twice, key="task")
        await STATE["began"].wait()
        await live.client.cancel([future])
        await until(lambda: live.worker.state.tasks["task"].state != "executing")
        STATE["go"].set()
        await STATE["ended"].wait()
        assert STATE["seen"] == [True, False]
        assert not still_wanted(live.worker, "never heard of")


async def test_a_task_that_takes_nothing_of_a_resource_runs_beside_one_that_takes_it_all():
    """What `libra.graph.iteration.beside` builds on: checkpoints are written where the replica is, while it steps."""
    async with cluster(TRAIN=1) as live, Worker(live.scheduler.address, name="plain", nthreads=4):
        held = live.client.submit(holds, key="holds", resources={"TRAIN": 1})
        await STATE["began"].wait()
        for n in range(4):
            await live.client.submit(str, n, key=f"beside-{n}", resources={"TRAIN": 0})
            assert [ws.name for ws in live.scheduler.tasks[f"beside-{n}"].who_has] == ["own"]
        STATE["go"].set()
        await held


async def test_a_worker_says_whether_a_task_takes_a_slot_and_counts_with_a_supply_that_was_set():
    async with cluster(SLOT=2) as live:
        assert not takes(live.worker, "SLOT")
        running = live.client.submit(holds, resources={"SLOT": 1}, pure=False)
        await STATE["began"].wait()
        assert takes(live.worker, "SLOT") and not takes(live.worker, "OTHER")
        STATE["go"].set()
        await running
        await until(lambda: not live.worker.state.executing)
        assert not takes(live.worker, "SLOT")
        for count in (0, 3):
            set_supply(live.worker, "SLOT", count)
            state = live.worker.state
            assert state.total_resources["SLOT"] == state.available_resources["SLOT"] == count
        assert await live.client.submit(str, 1, resources={"SLOT": 2}, pure=False) == "1"


class Slow(WorkerPlugin):
    """Sets up until the scheduler has heard of its worker again, and once more."""

    def __init__(self, name):
        self.name = name

    async def setup(self, worker):
        with heartbeat_during_setup(worker):
            ws = STATE["scheduler"].workers[worker.address]
            for _ in range(2):
                ws.last_seen = 0.0
                await until(lambda: ws.last_seen)
            STATE["running"] = ws.status is Status.running


async def test_a_worker_that_joins_is_heard_of_while_it_is_set_up():
    async with cluster() as live:
        STATE["scheduler"] = live.scheduler
        await live.worker.close()
        for name in ("one run", "another"):  # set up at the same time
            await live.client.register_plugin(Slow(name))
        with dask.config.set({"distributed.scheduler.worker-ttl": None}):
            async with Worker(live.scheduler.address) as worker:
                assert STATE["running"], "Dask sends it tasks already: that is why the plugin must not"
                assert worker.periodic_callbacks["heartbeat"].is_running()


async def test_workers_answer_each_other_until_one_stops_or_is_gone():
    async def answer(what, comm=None):
        return {"answered": what, "list": [1, {"nested": b"bytes"}]}

    async with cluster() as live:
        async with Worker(live.scheduler.address) as other:
            serve_worker(other, "libra-test", answer)
            found = await ask_worker(live.worker, other.address, "libra-test", what="x")
            assert found["answered"] == "x" and list(found["list"])[1]["nested"] == b"bytes"
            stop_serving(other, "libra-test")
            with pytest.raises(PEER_ERRORS):
                await ask_worker(live.worker, other.address, "libra-test", what="x")
        with dask.config.set({"distributed.comm.timeouts.connect": "10ms"}), pytest.raises(PEER_ERRORS):
            await ask_worker(live.worker, other.address, "libra-test", what="x")
