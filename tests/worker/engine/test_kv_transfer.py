"""KV from worker to worker: it arrives whole, or the context is computed again; nothing else is lost, whatever dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import kv_sender
import numpy as np
import pytest

from libra.errors import EngineError, KVRefused, TransportError
from libra.rollout import TransformersEngine
from libra.transport import new_secret
from libra.types import TurnRequest
from libra.worker.engine import kv_transfer
from libra.worker.engine.kv_transfer import KVTransfers, ask

SECRET = new_secret()
LIMIT = 2**26


@pytest.fixture
def sender(repository):
    """``sender(how)``: a process that gives KV, and its address."""
    started = []

    def start(how):
        command, path = [sys.executable, kv_sender.__file__, SECRET, how], {"PYTHONPATH": str(repository)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | path)
        started.append(process)
        assert process.stdout is not None
        return process, ("127.0.0.1", int(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.live
def test_it_arrives_whole_and_the_sender_is_told(sender):
    process, address = sender("good")
    kv = ask(address, SECRET, "a", 0, LIMIT)
    assert kv.header() == kv_sender.KV.header()
    assert kv.data.tobytes() == kv_sender.KV.data.tobytes()
    assert process.stdout.readline() == "kept\n"


@pytest.mark.live
@pytest.mark.parametrize(("how", "error"), [("corrupt", "checksum"), ("truncated", "4194300 bytes arrived of 4194304")])
def test_kv_that_arrives_damaged_is_refused(sender, how, error):
    with pytest.raises(KVRefused, match=error):
        ask(sender(how)[1], SECRET, "a", 0, LIMIT)


@pytest.mark.live
def test_kv_of_another_trajectory_or_version_or_that_is_too_large_is_refused(sender):
    process, address = sender("good")
    for asked in (("a", 0, 1000), ("a", 1, LIMIT), ("b", 0, LIMIT)):
        with pytest.raises(KVRefused):
            ask(address, SECRET, *asked)
        assert process.stdout.readline() == "not kept\n"
    with pytest.raises(TransportError):  # a stranger
        ask(address, new_secret(), "a", 0, LIMIT)


MOVE = {"home": "a", "worker": "b", "tokens": 43, "prefill_s": 0.0, "transfer_s": 0.0, "sent": True}


def context_of(reports):
    spec = SimpleNamespace(secret=SECRET)
    return SimpleNamespace(address="tcp://127.0.0.1:1", name="w", spec=spec, report=reports.append)


class Home:
    """One engine with what a worker has around it; ``reports`` are those it sent."""

    def __init__(self, model):
        self.engine = TransformersEngine(model, slots=2, max_context_tokens=256, threads=1, host_kv_gib=0.1)
        self.asleep, self.out, self.closed = False, None, False
        self.reports = []

    async def generate(self, request):
        return await self.engine.generate(request)

    def forget(self, trajectory_id):
        self.engine.forget(trajectory_id)

    async def start(self):
        await self.engine.start()
        return KVTransfers(context_of(self.reports), self, LIMIT)


def request(turn, context):
    return TurnRequest("a", turn, np.array(context, np.int32), 8, seed=turn)


def moved(model, home_of, before=lambda home: None):
    """Turn 0 at home, turn 1 on another engine; its output, its report, and whether home still has the KV.

    ``home_of`` gives the address that is announced for the move.
    """

    async def run():
        home, other = Home(model), Home(model)
        transfers = [await each.start() for each in (home, other)]
        try:
            first = await transfers[0].generate("key", request(0, list(range(40))))
            assert not home.reports
            await asyncio.gather(*filter(None, [before(home)]))
            transfers[1].announced("key", home_of(transfers[0]), MOVE)
            context = [*range(40), *first.token_ids.tolist(), 1, 2, 3]
            second = await transfers[1].generate("key", request(1, context))
            if home.closed:
                return second, other.reports, None
            await home.engine.pause()  # what was posted before has been handled
            return second, other.reports, home.engine.stats().retained
        finally:
            for each, transfer in zip((home, other), transfers, strict=True):
                transfer.close()
                await each.engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.fixture(scope="module")
def anew(random_model):
    """A move where nothing is fetched: the context is computed again."""
    return moved(random_model, lambda home: None)


def test_a_turn_continues_from_what_the_old_home_had(random_model, anew):
    output, (report,), kept = moved(random_model, lambda home: home.address)
    assert output.cached_tokens == 47
    assert (report.key, report.refused) == ("key", "")
    assert report.num_bytes > 0 and report.took_s > 0
    assert kept == 0, "the old home freed it"
    anew, (report,), kept = anew
    assert anew.token_ids.tolist() == output.token_ids.tolist()
    assert (anew.cached_tokens, report.num_bytes, report.refused, kept) == (0, 0, "", 1)
    assert report.took_s == pytest.approx(anew.prefill_s, abs=1e-6)
    assert 0 < anew.prefill_s < anew.busy_s


def test_stale_kv_and_kv_that_is_gone_are_computed_again(random_model, anew):
    async def newer(home):
        await home.engine.load_version(1, random_model)
        home.engine.forget("nobody")
        await home.engine.generate(request(1, list(range(30))))  # KV of version 1

    async def out(home):
        home.out = EngineError("it disagreed with its version")

    for before, why in (
        (newer, "version 1"),
        (lambda home: home.engine.abort("a"), "no KV of a"),
        (out, "out of service"),
    ):
        output, (report,), _ = moved(random_model, lambda home: home.address, before)
        assert why in report.refused
        assert (report.num_bytes, output.cached_tokens) == (0, 0)
        assert output.token_ids.tolist() == anew[0].token_ids.tolist()
        assert output.logprobs.tobytes() == anew[0].logprobs.tobytes()


def test_an_engine_that_sleeps_leaves_its_kv_to_others(random_model, anew):
    async def asleep(home):
        await home.engine.park_kv()
        await home.engine.close()
        home.closed = True

    output, (report,), _ = moved(random_model, lambda home: home.address, asleep)
    assert (output.cached_tokens, report.refused) == (47, "")
    assert output.token_ids.tolist() == anew[0].token_ids.tolist()


@pytest.mark.live
def test_a_sender_that_is_killed_in_mid_transfer_costs_a_prefill_and_nothing_else(random_model, anew, sender):
    process, address = sender("half")

    def kill():
        process.stdout.readline()  # half of the bytes are sent
        os.kill(process.pid, signal.SIGKILL)

    def home_of(home):
        asyncio.get_running_loop().run_in_executor(None, kill)
        return address

    output, (report,), kept = moved(random_model, home_of)
    assert report.refused and not report.num_bytes
    assert output.token_ids.tolist() == anew[0].token_ids.tolist()
    assert output.logprobs.tobytes() == anew[0].logprobs.tobytes()
    assert kept == 1, "the real home keeps its own"


@pytest.mark.live
def test_a_home_that_is_stopped_is_given_up_once_and_holds_up_nobody_else(sender, monkeypatch):
    """Six trajectories have their KV there at once; those that come later do not wait, and another home's arrives."""
    stopped = socket.create_server(("127.0.0.1", 0))  # the kernel accepts connections, and nobody answers
    stopped.setblocking(False)
    reports = []

    async def generate(request):
        return SimpleNamespace(cached_tokens=kv_sender.KV.num_tokens, prefill_s=0.0)

    async def import_kv(kv):
        return True

    async def run():
        engine = SimpleNamespace(version=0, import_kv=import_kv)
        transfers = KVTransfers(context_of(reports), SimpleNamespace(engine=engine, generate=generate), LIMIT)
        try:
            monkeypatch.setattr(kv_transfer, "GIVE_UP_S", 1.0)
            for number in range(6):
                transfers.announced(f"early {number}", stopped.getsockname(), MOVE)
            await asyncio.gather(*(transfers.generate(f"early {n}", request(1, [0])) for n in range(6)))
            monkeypatch.setattr(kv_transfer, "GIVE_UP_S", 100.0)
            transfers.announced("late", stopped.getsockname(), MOVE)
            await transfers.generate("late", request(1, [0]))
            transfers.announced("good", sender("good")[1], MOVE)
            await transfers.generate("good", request(1, [0]))
        finally:
            transfers.close()

    asyncio.run(asyncio.wait_for(run(), 90))
    for _ in range(kv_transfer.ASKED_OF_ONE):
        stopped.accept()[0].close()
    with pytest.raises(BlockingIOError):
        stopped.accept()
    stopped.close()
    *early, late, good = reports
    assert len(early) == 6 and all(report.refused and not report.num_bytes for report in early)
    assert "last 30 s" in late.refused
    assert (good.key, good.refused, good.num_bytes) == ("good", "", kv_sender.KV.num_bytes)
