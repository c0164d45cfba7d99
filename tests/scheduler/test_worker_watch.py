"""Workers that join in mid-run on a real scheduler get nothing until they are ready; work that nobody does is reported."""

import asyncio
import contextlib

import pytest
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from libra import keys
from libra.errors import EngineError
from libra.facts import STREAM_OP, EngineQuarantined, SetupFailed, WorkerReady, pack
from libra.policy import liveness
from libra.policy.liveness import REMIND_S, START_S, TELL_AFTER_S
from libra.scheduler import worker_watch
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
    caplog.set_level("ERROR", "libra.scheduler.worker_watch")
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        async with joining(emulation, live, "demo") as address:
            ends("demo", "OSError: no space left")
            await emulation.until(lambda: rows(live) == [("late", "failed", "OSError: no space left")])
            assert supplied(live, address) == set()
            assert "late" not in live.plugin.trajectories.workers.address
            pid = live.scheduler.workers[address].pid
        assert rows(live) == []  # it has left
    (line,) = (record.getMessage() for record in caplog.records if record.name == "libra.scheduler.worker_watch")
    assert f"kill -9 {pid} on 127.0.0.1" in line
    (event,) = (e for e in read_events(tmp_path / "events.jsonl").events if e["name"] == "worker_setup_failed")
    assert (event["worker"], event["address"], event["detail"]) == ("late", address, "OSError: no space left")


async def test_a_worker_with_a_nanny_is_started_anew_so_often_and_then_left_to_people(emulation, tmp_path, monkeypatch):
    restarted = []

    async def restart(scheduler, address, stimulus_id):
        restarted.append(address)
        return "OK"

    monkeypatch.setattr(liveness, "RESTART_AFTER_S", (0.0, 3600.0))
    monkeypatch.setattr(worker_watch.scheduler_internals, "restart_worker", restart)

    async with emulation.cluster() as live:
        emulation.register(live, tmp_path)
        async with joining(emulation, live, "demo") as address:
            live.scheduler.workers[address].nanny = "tcp://127.0.0.1:1"

            def fails():
                live.plugin.watch.joined(address, ["demo"])
                emulation.say(live, SetupFailed("late", "OSError: no space left"), worker=address)
                (row,) = next(iter(live.plugin.snapshots()))["not_ready"]
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


async def test_a_worker_that_failed_for_one_run_is_asked_for_nothing_by_another_until_it_is_over(emulation, tmp_path):
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
    assert not [record for record in caplog.records if record.name == "libra.scheduler.worker_watch"]


async def test_missing_roles_are_reported_with_cause_and_advice(emulation, tmp_path):
    async with emulation.cluster() as live:
        live.scheduler.periodic_callbacks["libra-sample"].stop()  # which looks by the true time
        emulation.register(live, tmp_path)
        plugin, state, read = live.plugin, live.plugin.runs["demo"], [0]

        def ready(worker):
            emulation.say(live, WorkerReady(worker.name), worker=worker.address)

        def told(at_s):
            plugin.watch.look(state, at_s)
            new = plugin.notices("demo", 0, read[0])
            read[0] += len(new)
            return " | ".join(text for _, text in new)

        assert told(0.0) == told(TELL_AFTER_S - 0.1) == ""
        assert "TRAIN not there yet: no worker of this cluster has it" in told(TELL_AFTER_S)
        assert told(START_S - 0.1) == ""  # the others are being set up
        assert "ROLLOUT, TOOL, GRADE, COMMIT not there yet: worker rollout-0 (process" in told(START_S)
        for worker in live.workers:
            ready(worker)
        assert f"is there after {START_S + 4.0:.0f} s: rollout-0, tool-0" in told(START_S + 4.0)
        assert f"dask worker {live.scheduler.address} --nthreads 9 --resources TRAIN=1" in told(10.0 + REMIND_S)

        await live.workers[1].close()
        await emulation.until(lambda: all(ws.name != "tool-0" for ws in live.scheduler.workers.values()))
        t_s = 400.0
        assert told(t_s) == told(t_s + TELL_AFTER_S - 0.1) == ""
        assert "(TOOL, COMMIT): worker tool-0 has left" in told(t_s + TELL_AFTER_S)
        supplies = {keys.TOOL: 2, keys.COMMIT: 1}
        async with Worker(live.scheduler.address, nthreads=4, name="tool-0", resources=supplies) as back:
            assert told(t_s + TELL_AFTER_S + 1.0) == ""  # it may be ready at once
            pid = live.scheduler.workers[back.address].pid
            assert f"worker tool-0 (process {pid} on" in told(t_s + 2 * TELL_AFTER_S)
            await emulation.until(lambda: live.scheduler.workers[back.address] in live.scheduler.running)
            ready(back)
            assert "TOOL, COMMIT is there again after 13 s: tool-0" in told(t_s + 2 * TELL_AFTER_S + 1.0)
            fails = EngineQuarantined(3, "rollout-0", "layers.0", "logits", 0.5, 0.1, "gap 0.5", False)
            emulation.say(live, fails, worker=live.workers[0].address)
            told(500.0)
            assert "(ROLLOUT): the engine of worker rollout-0 failed the version check" in told(506.0)
            assert plugin.progress("demo", 0)[2:] == ("nobody generates", "")
            waiting = keys.make("trajectory", (0, 0, 0), epoch=0, run="demo")
            trajectory = live.client.submit(str, 1, key=waiting, resources={keys.PARK: 1})
            await emulation.until(lambda: getattr(live.scheduler.tasks.get(waiting), "state", "") == "no-worker")
            fails = EngineQuarantined(3, "rollout-0", "layers.0", "logits", 0.5, 0.1, "gap 0.5", True)
            emulation.say(live, fails, worker=live.workers[0].address)
            told(513.0)
            with pytest.raises(EngineError, match=r"version 3: layers\.0: gap 0\.5.*libra resume"):
                await asyncio.wait_for(trajectory, 10)
            trajectory.release()
        assert plugin.notices("demo", 1, 0) == plugin.notices("other", 0, 0) == []
