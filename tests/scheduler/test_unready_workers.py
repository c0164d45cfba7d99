"""Workers that join in mid-run on a real scheduler: asked for nothing until they are ready, told of where they never are."""

import asyncio
import contextlib

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from libra import keys
from libra.facts import STREAM_OP, SetupFailed, WorkerReady, pack
from libra.scheduler import unready_workers
from libra.store.event_log import read_events

SUPPLIES = {keys.TOOL: 2, keys.GRADE: 4, keys.TRAIN: 1}


class Host(WorkerPlugin):
    """Stand-in for the part of a run on a worker; a test says how its setup ends."""

    idempotent = False
    ends: dict[str, asyncio.Future[str]] = {}
    """By run; what went wrong, or an empty text."""

    def __init__(self, run):
        self.run, self.name = run, keys.host_name(run)

    async def setup(self, worker):
        if worker.name != "late":
            return
        detail = await self.ends.setdefault(self.run, asyncio.get_running_loop().create_future())
        fact = SetupFailed(worker.name, detail) if detail else WorkerReady(worker.name)
        worker.batched_send({"op": STREAM_OP, "run": self.run, "epoch": 0, "packed": pack([fact])})
        if detail:
            raise OSError(detail)


def ends(run, detail=""):
    """The setup of a run on the worker that joins ends so."""
    Host.ends.setdefault(run, asyncio.get_running_loop().create_future()).set_result(detail)


@contextlib.asynccontextmanager
async def joining(emulation, live, *runs):
    """A worker that joins while these runs go on; its address, once its setup has begun."""
    Host.ends.clear()
    for run in runs:
        await live.client.register_plugin(Host(run))
    late = Worker(live.scheduler.address, nthreads=4, name="late", resources=SUPPLIES)
    started = asyncio.ensure_future(late.start())
    await emulation.until(lambda: any(ws.name == "late" for ws in live.scheduler.workers.values()))
    try:
        yield late.address
    finally:
        for run in runs:
            end = Host.ends.setdefault(run, asyncio.get_running_loop().create_future())
            if not end.done():
                end.set_result("")
        await started
        await late.close()


def rows(live, run="demo"):
    found = next(s["not_ready"] for s in live.plugin.snapshots() if s["run"] == run)
    assert all(row["for_s"] >= 0 for row in found)
    return [(row["worker"], row["stage"], row["detail"]) for row in found]


def supplied(live, address):
    """What Dask gives out there."""
    return {name for name, by in live.scheduler.resources.items() if address in by and name != keys.TOOL}


async def test_a_joiner_is_asked_for_nothing_until_it_is_ready(emulation, tmp_path):
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        async with joining(emulation, live, "demo") as address:
            assert rows(live) == [("late", "setting_up", "")]
            assert supplied(live, address) == set()
            waits = live.client.submit(str, 1, key="step", resources={keys.TRAIN: 1})
            grades = live.client.submit(str, 2, key="grade", resources={keys.GRADE: 1})
            assert await grades == "2"
            assert next(iter(live.scheduler.tasks["grade"].who_has)).name == "rollout-0"
            assert live.scheduler.tasks["step"].state == "no-worker"
            ends("demo")
            assert await waits == "1"
            assert rows(live) == [] and supplied(live, address) == {keys.GRADE, keys.TRAIN}


async def test_a_failure_is_an_event_and_a_line_that_says_what_to_do(emulation, tmp_path, caplog):
    caplog.set_level("ERROR", "libra.scheduler.unready_workers")
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        async with joining(emulation, live, "demo") as address:
            ends("demo", "OSError: no space left")
            await emulation.until(lambda: rows(live) == [("late", "failed", "OSError: no space left")])
            assert supplied(live, address) == set()
            assert "late" not in live.plugin.trajectories.workers.address
            pid = live.scheduler.workers[address].pid
        assert rows(live) == []  # it has left
    (line,) = (record.getMessage() for record in caplog.records if record.name == "libra.scheduler.unready_workers")
    assert "no other worker supplies TRAIN" in line and f"kill -9 {pid} on 127.0.0.1" in line  # others grade
    (event,) = (e for e in read_events(tmp_path / "events.jsonl").events if e["name"] == "worker_setup_failed")
    assert (event["worker"], event["address"], event["detail"]) == ("late", address, "OSError: no space left")


async def test_a_worker_with_a_nanny_is_started_anew_so_often_and_then_left_to_people(emulation, tmp_path, monkeypatch):
    restarted = []

    async def restart(scheduler, address, stimulus_id):
        restarted.append(address)
        return "OK"

    monkeypatch.setattr(unready_workers, "RETRY_AFTER_S", (0.0, 3600.0))
    monkeypatch.setattr(unready_workers.dask_internals, "restart_worker", restart)

    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        async with joining(emulation, live, "demo") as address:
            live.scheduler.workers[address].nanny = "tcp://127.0.0.1:1"

            def fails():
                live.plugin.not_ready.joined("demo", address)
                emulation.say(live, SetupFailed("late", "OSError: no space left"), worker=address)
                (row,) = live.plugin.not_ready.rows("demo")
                return row["again_in_s"]

            assert fails() == 0
            await emulation.until(lambda: restarted == [address])
            assert 3000 < (fails() or 0) <= 3600
            assert fails() is None  # the third time in a row
            emulation.say(live, WorkerReady("late"), worker=address)
            assert fails() == 0  # it was well meanwhile
            await emulation.until(lambda: restarted == [address] * 2)
    events = [e for e in read_events(tmp_path / "events.jsonl").events if e["name"] == "worker_setup_failed"]
    assert [e["retry_after_s"] for e in events] == [0.0, 3600.0, None, 0.0]


async def test_a_worker_that_failed_for_one_run_is_asked_for_nothing_by_another_until_that_run_is_over(
    emulation, tmp_path
):
    async with emulation.cluster() as live:
        for run in ("demo", "other"):
            emulation.register(live, tmp_path / run, run)
        async with joining(emulation, live, "demo", "other") as address:
            ends("other")
            await emulation.until(lambda: rows(live, "other") == [])
            assert supplied(live, address) == set()
            ends("demo", "OSError: no space left")
            await emulation.until(lambda: rows(live) == [("late", "failed", "OSError: no space left")])
            assert supplied(live, address) == set()
            live.plugin.end_run("demo")
            assert supplied(live, address) == {keys.GRADE, keys.TRAIN}


async def test_a_failure_where_the_run_is_only_starting_takes_nothing_from_anybody(emulation, tmp_path, caplog):
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        address = live.workers[0].address
        for at in ({"worker": address}, {"worker": "tcp://10.0.0.1:1"}, {"worker": address, "epoch": 7}):
            emulation.say(live, SetupFailed("rollout-0", "OSError"), **at)
        assert rows(live) == [] and supplied(live, address) == {keys.ROLLOUT, keys.GRADE}
    assert not [record for record in caplog.records if record.name == "libra.scheduler.unready_workers"]
