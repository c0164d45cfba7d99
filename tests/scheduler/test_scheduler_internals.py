"""The contract of `libra.scheduler.scheduler_internals` with Dask: what it reads and writes is there, and does what it says."""

import asyncio
import contextlib
from types import SimpleNamespace

from distributed import Client, Reschedule, Scheduler, Worker, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin

from libra import keys
from libra.scheduler import scheduler_internals
from libra.scheduler.scheduler_internals import Release
from libra.worker.dask_worker import quantum_here

RUNS = []
"""Where `once_more` ran; functions of a module are not copied on their way to a worker of this process."""


async def once_more():
    worker = get_worker()
    RUNS.append((worker.name, quantum_here(worker, "again")))
    if len(RUNS) == 1:
        raise Reschedule()
    return worker.name


class ParksAgain(SchedulerPlugin):
    """Puts restrictions back as Libra's plugin does: in the transition that leaves ``processing``, not before."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "processing" and (ts := self.scheduler.tasks.get(key)) is not None:
            scheduler_internals.park(ts)


@contextlib.asynccontextmanager
async def two_workers():
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", validate=True) as scheduler,
        Worker(scheduler.address, name="a", resources={keys.ROLLOUT: 2}) as a,
        Worker(scheduler.address, name="b", resources={keys.ROLLOUT: 1, keys.TOOL: 3}) as b,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        yield SimpleNamespace(scheduler=scheduler, a=a, b=b, client=client)


async def state_of(scheduler, key, state):
    while key not in scheduler.tasks or scheduler.tasks[key].state != state:  # noqa: ASYNC110  no event for a state
        await asyncio.sleep(0)


class HeldBack(SchedulerPlugin):
    """Holds back what every worker that joins supplies."""

    def __init__(self):
        self.held = {}

    def add_worker(self, scheduler, worker):
        self.held[worker] = scheduler_internals.hold_back(scheduler, worker, [keys.GRADE, keys.TRAIN, keys.COMMIT])


async def test_a_worker_that_joins_is_sent_nothing_that_asks_for_what_is_held_back_not_even_for_none_of_it():
    async with two_workers() as dask:
        asked = {"one": {keys.GRADE: 1}, "none": {keys.TRAIN: 0}}
        futures = [dask.client.submit(str, 1, key=key, resources=wants) for key, wants in asked.items()]
        for key in asked:
            await state_of(dask.scheduler, key, "no-worker")
        plugin = HeldBack()
        dask.scheduler.add_plugin(plugin)
        supplies = {keys.GRADE: 2, keys.TRAIN: 1, keys.TOOL: 3}
        async with Worker(dask.scheduler.address, name="c", resources=supplies) as c:
            assert plugin.held[c.address] == {keys.GRADE: 2, keys.TRAIN: 1}
            assert dask.scheduler.workers[c.address].resources == {keys.TOOL: 3}
            assert {dask.scheduler.tasks[key].state for key in asked} == {"no-worker"}
            scheduler_internals.restore_supply(dask.scheduler, c.address, plugin.held[c.address], "test")
            assert await dask.client.gather(futures) == ["1", "1"]
            assert dask.scheduler.workers[c.address].resources == supplies
            assert dask.scheduler.workers[c.address].used_resources[keys.GRADE] == 0
        scheduler_internals.restore_supply(dask.scheduler, c.address, plugin.held[c.address], "test")  # it has left
        assert not dask.scheduler.resources[keys.GRADE]

        async with Worker(dask.scheduler.address, name="d", resources=supplies):
            pass  # leaves while it is held back
        assert not dask.scheduler.resources[keys.TRAIN]


async def test_a_task_that_asks_for_what_nobody_supplies_waits_and_is_released_where_it_is_sent():
    async with two_workers() as dask:
        future = dask.client.submit(str, 1, key="parked", resources={keys.PARK: 1})
        await state_of(dask.scheduler, "parked", "no-worker")
        assert scheduler_internals.is_parked(dask.scheduler.tasks["parked"])
        for name, worker in (("a", dask.a), ("b", dask.b)):
            key = f"to {name}"
            sent = dask.client.submit(str, name, key=key, resources={keys.PARK: 1})
            await state_of(dask.scheduler, key, "no-worker")
            at = [Release(key, {keys.ROLLOUT: 1}, worker.address)]
            assert scheduler_internals.release(dask.scheduler, at, "test") == [key]
            assert await sent == name
            assert dask.scheduler.tasks[key].who_has == {dask.scheduler.workers[worker.address]}
        assert scheduler_internals.release(dask.scheduler, [Release("unknown", {}, None)], "test") == []
        assert dask.scheduler.tasks["parked"].state == "no-worker"
        del future


async def test_restrictions_must_be_put_back_when_a_task_leaves_processing():
    RUNS.clear()
    async with two_workers() as dask:
        future = dask.client.submit(once_more, key="again", resources={keys.PARK: 1})
        await state_of(dask.scheduler, "again", "no-worker")
        dask.scheduler.add_plugin(ParksAgain(dask.scheduler))
        scheduler_internals.release(dask.scheduler, [Release("again", {keys.ROLLOUT: 1}, dask.a.address)], "test")
        while not RUNS:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await state_of(dask.scheduler, "again", "no-worker")
        scheduler_internals.release(dask.scheduler, [Release("again", {keys.ROLLOUT: 1}, dask.b.address, 7)], "test")
        assert await future == "b"
    assert RUNS == [("a", 0), ("b", 7)], "a worker knows which quantum a task was sent for"


async def test_supplies_names_priorities_and_handlers():
    async with two_workers() as dask:
        assert scheduler_internals.supply(dask.scheduler, keys.ROLLOUT) == {dask.a.address: 2, dask.b.address: 1}
        assert scheduler_internals.supply(dask.scheduler, keys.TRAIN) == {}
        assert scheduler_internals.worker_name(dask.scheduler, dask.b.address) == "b"
        assert scheduler_internals.worker_name(dask.scheduler, "tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"
        scheduler_internals.add_handlers(dask.scheduler, {"libra_test": lambda number: number + 1})
        assert await dask.client.scheduler.libra_test(number=1) == 2
        future = dask.client.submit(str, 1, key="parked", resources={keys.PARK: 1})
        await state_of(dask.scheduler, "parked", "no-worker")
        ts = dask.scheduler.tasks[future.key]
        scheduler_internals.set_priority(ts, (3, 1, 4))
        ts.suspicious = 2
        scheduler_internals.forgive(ts)
        assert (ts.priority, ts.suspicious) == ((3, 1, 4), 0)
        await dask.b.close()
        assert scheduler_internals.supply(dask.scheduler, keys.TOOL) == {}


async def test_a_supply_that_is_zeroed_is_none_and_one_that_is_raised_takes_more():
    async with two_workers() as dask:
        address = dask.a.address
        scheduler_internals.set_supply(dask.scheduler, address, keys.ROLLOUT, 0)
        assert scheduler_internals.supply(dask.scheduler, keys.ROLLOUT) == {dask.b.address: 1}
        future = dask.client.submit(str, 1, key="elsewhere", resources={keys.ROLLOUT: 1})
        await future
        assert {ws.address for ws in dask.scheduler.tasks["elsewhere"].who_has} == {dask.b.address}
        scheduler_internals.set_supply(dask.scheduler, address, keys.ROLLOUT, 5)
        scheduler_internals.set_supply(dask.scheduler, address, keys.TP, 2)
        assert scheduler_internals.supply(dask.scheduler, keys.ROLLOUT)[address] == 5
        assert scheduler_internals.bucket(dask.scheduler, address) == "tp2"
