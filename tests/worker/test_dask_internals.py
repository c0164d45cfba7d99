"""The contract of `libra.worker.dask_internals` with Dask: what it changes and reads is there, and means what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import distributed.worker
import pytest
from distributed import Client, Reschedule, Scheduler, Worker, get_worker
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from libra.worker.dask_internals import (
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

STATE: dict[str, Any] = {}
"""What the tasks below share with their test; functions of a module are not copied on their way to a worker here."""


def test_dask_itself_makes_a_message_of_every_exception_and_reads_only_the_type_of_reschedule():
    cheap_reschedule()
    light = distributed.worker.error_message(Reschedule())
    try:
        raise ValueError("kept")
    except ValueError as error:
        full = distributed.worker.error_message(error)
    assert light.keys() == full.keys()
    assert light["exception"] is None
    assert full["exception_text"] == "ValueError('kept')"
    assert full["traceback"] is not None


def test_a_task_that_reschedules_runs_again_and_one_that_fails_still_says_why():
    asyncio.run(_reschedule_and_fail())


async def at_the_third_time() -> int:
    STATE["calls"] += 1
    if STATE["calls"] < 3:
        raise Reschedule()
    return STATE["calls"]


async def fails() -> None:
    raise ValueError("of its own")


async def _reschedule_and_fail():
    cheap_reschedule()
    STATE["calls"] = 0
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        assert await client.submit(at_the_third_time, key="again") == 3
        error = await client.submit(fails, key="fails").exception()
        assert repr(error) == "ValueError('of its own')"


def test_a_running_task_is_wanted_until_it_is_cancelled():
    asyncio.run(_cancel_a_running_task())


async def looks_twice() -> None:
    STATE["seen"].append(still_wanted(get_worker(), "task"))
    STATE["begun"].set()
    await STATE["cancelled"].wait()
    STATE["seen"].append(still_wanted(get_worker(), "task"))
    STATE["ended"].set()


async def _cancel_a_running_task():
    STATE.update(begun=asyncio.Event(), cancelled=asyncio.Event(), ended=asyncio.Event(), seen=[])
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        future = client.submit(looks_twice, key="task")
        await STATE["begun"].wait()
        await client.cancel([future])
        while worker.state.tasks["task"].state == "executing":  # noqa: ASYNC110  a state of Dask's, no event to await
            await asyncio.sleep(0)
        STATE["cancelled"].set()
        await STATE["ended"].wait()
    assert STATE["seen"] == [True, False]
    assert not still_wanted(worker, "never heard of")


def test_a_task_that_takes_nothing_of_a_resource_runs_beside_one_that_takes_it_all():
    """What `libra.graph.iteration.beside` builds on: checkpoints are written where the replica is, while it steps."""
    asyncio.run(_take_nothing_of_a_resource())


async def holds() -> None:
    STATE["held"].set()
    await STATE["let_go"].wait()


async def runs_beside() -> str:
    return str(get_worker().name)


async def _take_nothing_of_a_resource():
    STATE.update(held=asyncio.Event(), let_go=asyncio.Event())
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, name="plain", nthreads=4),
        Worker(scheduler.address, name="train", nthreads=2, resources={"TRAIN": 1}),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        held = client.submit(holds, key="holds", resources={"TRAIN": 1})
        await STATE["held"].wait()
        names = [await client.submit(runs_beside, key=f"beside-{n}", resources={"TRAIN": 0}) for n in range(4)]
        assert set(names) == {"train"}
        STATE["let_go"].set()
        await held


def test_a_worker_says_whether_a_task_takes_a_slot_and_counts_with_what_it_is_told():
    asyncio.run(_take_and_supply())


async def holds_a_slot() -> None:
    STATE["began"].set()
    await STATE["go"].wait()


async def _take_and_supply():
    STATE["began"], STATE["go"] = asyncio.Event(), asyncio.Event()
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, resources={"SLOT": 2}) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        assert not takes(worker, "SLOT")
        running = client.submit(holds_a_slot, resources={"SLOT": 1}, pure=False)
        await STATE["began"].wait()
        assert takes(worker, "SLOT") and not takes(worker, "OTHER")
        STATE["go"].set()
        await running
        while worker.state.executing:  # noqa: ASYNC110  no event for what a worker forgets
            await asyncio.sleep(0)
        assert not takes(worker, "SLOT")
        for count in (0, 3):
            set_supply(worker, "SLOT", count)
            assert worker.state.total_resources["SLOT"] == worker.state.available_resources["SLOT"] == count
        assert await client.submit(str, 1, resources={"SLOT": 2}, pure=False) == "1"


def test_a_worker_that_joins_is_heard_of_while_it_is_set_up():
    asyncio.run(_join_slowly())


class Slow(WorkerPlugin):
    """Sets up until the scheduler has heard of its worker again, and once more."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def setup(self, worker: Worker) -> None:
        with heartbeat_during_setup(worker):
            ws = STATE["scheduler"].workers[worker.address]
            for _ in range(2):
                ws.last_seen = 0.0
                while ws.last_seen == 0.0:  # noqa: ASYNC110  Dask has no event for this
                    await asyncio.sleep(0)
            STATE["running"] = ws.status is Status.running


async def _join_slowly():
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        STATE["scheduler"] = scheduler
        for name in ("one run", "another"):  # set up at the same time
            await client.register_plugin(Slow(name))
        async with Worker(scheduler.address) as worker:
            assert STATE["running"], "Dask sends it tasks already: that is why the plugin must not"
            heartbeat = worker.periodic_callbacks["heartbeat"]
            assert heartbeat.is_running()
            heartbeat.stop()
            assert heartbeat._timeout is None, "it was started once"


def test_workers_answer_each_other_until_one_stops_or_is_gone():
    asyncio.run(_asked_by_a_peer())


async def _asked_by_a_peer():
    async def answer(what: str, comm: Any = None) -> dict[str, Any]:
        return {"answered": what, "list": [1, {"nested": b"bytes"}]}

    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address) as one,
    ):
        async with Worker(scheduler.address) as other:
            serve_worker(other, "libra-test", answer)
            found = await ask_worker(one, other.address, "libra-test", what="x")
            assert found["answered"] == "x" and list(found["list"])[1]["nested"] == b"bytes"
            stop_serving(other, "libra-test")
            with pytest.raises(PEER_ERRORS):
                await ask_worker(one, other.address, "libra-test", what="x")
        with pytest.raises(PEER_ERRORS):
            await ask_worker(one, other.address, "libra-test", what="x")
