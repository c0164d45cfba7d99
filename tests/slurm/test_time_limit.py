"""A worker near the end of its job: it finishes what it runs, takes nothing new, and leaves."""

import asyncio
import time

import dask
from distributed import Client, Event, Scheduler, Worker

from libra.cluster.settings import DASK_SETTINGS
from libra.cluster.worker_process import end_of_job_s, leave_in_time


def test_a_job_without_a_limit_never_leaves():
    assert [end_of_job_s({"LIBRA_JOB_END_S": text}) for text in ("", "0", "99")] == [None, None, 99.0]
    assert end_of_job_s({}) is None


async def _held(name):
    await Event(f"{name}-began").set()
    await Event(f"{name}-may-end").wait()
    return name


def test_what_runs_ends_and_nothing_new_comes():
    async def body():
        async with (
            Scheduler(port=0, dashboard_address=":0") as scheduler,
            Worker(scheduler.address, name="leaves", nthreads=4) as leaves,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            running = client.submit(_held, "first")
            await Event("first-began", client=client).wait()
            end_s = time.time() + 1000
            leaving = asyncio.ensure_future(leave_in_time(leaves, end_s, 1001))
            while scheduler.workers[leaves.address] in scheduler.running:  # noqa: ASYNC110 (it pauses first)
                await asyncio.sleep(0)
            later = client.submit(_held, "second")
            async with Worker(scheduler.address, name="stays", nthreads=4) as stays:
                await Event("second-began", client=client).wait()
                assert later.key in stays.state.tasks
                assert later.key not in leaves.state.tasks
                assert not leaving.done()
                await Event("first-may-end", client=client).set()
                await leaving
                assert await running == "first"
                assert [ws.name for ws in scheduler.workers.values()] == ["stays"]
                await leave_in_time(stays, time.time(), 1001)  # what does not end in time is left behind
                assert not scheduler.workers
                await later.cancel()

    with dask.config.set(DASK_SETTINGS):  # with Dask's own the memory monitor makes a paused worker run again
        asyncio.run(body())
