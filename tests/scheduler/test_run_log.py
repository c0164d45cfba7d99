"""What is left on a scheduler of a run that ended or whose driver has gone; who is asked for a version."""

import asyncio

import msgspec
from distributed import Client, WorkerPlugin
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.keys import host_name
from libra.scheduler import RunRegistration
from libra.scheduler.run_log import RunLog
from libra.scheduler.run_state import Holders
from libra.store.event_log import EventLog, read_events, segments_of

TRAINER, NEAR, FAR, ASKER = "tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://b:2"


async def test_a_run_whose_driver_leaves_makes_room_for_the_next_and_one_that_was_resumed_meanwhile_goes_on(
    emulation, tmp_path, caplog
):
    caplog.set_level("WARNING", "libra.scheduler.plugin")
    async with emulation.cluster() as live:
        gangs = live.plugin.gangs
        async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
            emulation.register(live, tmp_path, client=driver.id)
            assert gangs.register_gang("demo", 0, 2) == {}
            assert "'demo' trains on several replicas" in gangs.register_gang("next", 0, 2)["error"]
        await emulation.until(lambda: "demo" not in live.plugin.runs)
        assert gangs.register_gang("next", 0, 2) == {}
        assert f"type libra resume {tmp_path}" in caplog.text

        async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
            emulation.register(live, tmp_path, epoch=1, client=driver.id)
            emulation.register(live, tmp_path, epoch=2, client=live.client.id)
            left = driver.id
        await emulation.until(lambda: left not in live.scheduler.clients)
        live.plugin.end_run("demo", 1)  # what the driver of that start says at last
        assert live.plugin.runs["demo"].epoch == 2
    starts = [e["epoch"] for e in read_events(tmp_path / "events.jsonl").events if e["name"] == "run_started"]
    assert starts == [0, 1, 2]


class Part(WorkerPlugin):
    """Stands for a run's part on a worker; its end waits for ``gate``."""

    gate: asyncio.Event
    order: list[str]

    def __init__(self, start):
        self.name, self.start = host_name("demo"), start

    def setup(self, worker):
        self.order.append(f"{self.start} begins on {worker.name}")

    async def teardown(self, worker):
        await self.gate.wait()
        self.order.append(f"{self.start} ends on {worker.name}")


def registration(directory, client, epoch):
    return msgspec.to_builtins(RunRegistration("demo", epoch, str(directory), client=client.id))


async def test_a_killed_drivers_run_leaves_its_workers_before_its_next_start_comes(emulation, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(Part, "order", order, raising=False)
    monkeypatch.setattr(Part, "gate", asyncio.Event(), raising=False)
    async with emulation.cluster() as live:
        async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
            rpc = driver.scheduler
            assert "error" not in await rpc.libra_register_run(registration=registration(tmp_path, driver, 0))
            await driver.register_plugin(Part("first"))
            async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as reader:
                left = reader.id
            await emulation.until(lambda: left not in live.scheduler.clients)
            assert host_name("demo") in live.scheduler.worker_plugins, "another client is not the driver"
        await emulation.until(lambda: "demo" not in live.plugin.runs)
        rpc = live.client.scheduler
        again = asyncio.ensure_future(rpc.libra_register_run(registration=registration(tmp_path, live.client, 1)))
        await emulation.until(lambda: host_name("demo") not in live.scheduler.worker_plugins)  # nor does one that joins
        assert not again.done() and "demo" not in live.plugin.runs
        Part.gate.set()
        assert "error" not in await again
        await live.client.register_plugin(Part("second"))
        live.plugin.end_run("demo", 1)
    for at, what in ((0, "first begins"), (2, "first ends"), (4, "second begins")):
        assert sorted(order[at : at + 2]) == [f"{what} on rollout-0", f"{what} on tool-0"]


async def test_a_driver_that_has_gone_before_its_log_was_open_leaves_no_run(emulation, tmp_path):
    async with emulation.cluster() as live:
        async with Client(live.scheduler.address, asynchronous=True, set_as_default=False) as driver:
            message = registration(tmp_path, driver, 0)
            gone = driver.id
        await emulation.until(lambda: gone not in live.scheduler.clients)
        answer = await live.client.scheduler.libra_register_run(registration=message)
        assert answer == {"error": "the driver of run 'demo' has left"} and not live.plugin.runs


def test_the_log_of_an_ended_run_is_compressed_to_its_last_line_and_goes_on_in_a_resumed_run(tmp_path):
    path = tmp_path / "events.jsonl"

    def part(first, last):
        log = RunLog("demo", EventLog(path))
        for number in range(first, last):
            log.emit(facts.PolicyLearned(seconds=float(number)))
        log.close().wait_compressed()

    part(0, 20_000)  # two megabytes
    assert path.read_bytes() == b"" and [segment.last for segment in segments_of(path)] == [20_000]
    assert sum(segment.packed.stat().st_size for segment in segments_of(path)) < 200_000
    part(20_000, 20_003)
    assert len(path.read_bytes().splitlines()) == 3, "a few lines stay as they are"
    assert [event["seconds"] for event in read_events(path).events] == [float(number) for number in range(20_003)]


def test_nearest_first_and_the_trainer_last():
    holders = Holders()
    holders.offers(TRAINER, ("a", 11), trains=True)
    holders.has(TRAINER, 3, "digest")
    assert holders.nearest(3, ASKER) == [("a", 11)]
    for worker, at in ((FAR, ("c", 13)), (NEAR, ("b", 12)), (ASKER, ("b", 22))):
        holders.offers(worker, at)
        holders.has(worker, 3)
    assert holders.nearest(3, ASKER) == [("b", 12), ("c", 13), ("a", 11)]
    assert holders.nearest(4, ASKER) == []
    holders.lost(NEAR)
    assert holders.nearest(3, ASKER) == [("c", 13), ("a", 11)]
    assert holders.digest(3) == "digest" and holders.digest(4) is None


@given(
    st.lists(st.tuples(st.sampled_from(["offers", "has", "lost"]), st.integers(0, 4), st.integers(0, 2)), max_size=30)
)
def test_only_who_is_there_and_has_it_is_named(moves):
    holders, there, has = Holders(), set(), set()
    for move, worker, version in moves:
        name = f"tcp://{worker}:1"
        if move == "offers":
            holders.offers(name, (str(worker), 1))
            there.add(worker)
        elif move == "has":
            holders.has(name, version)
            has.add((worker, version))
        else:
            holders.lost(name)
            there.discard(worker)
            has = {pair for pair in has if pair[0] != worker}
    for version in range(3):
        named = {int(host) for host, _ in holders.nearest(version, "tcp://4:1")}
        assert named == {worker for worker in there if (worker, version) in has and worker != 4}
