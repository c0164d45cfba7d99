"""KV from worker to worker: it arrives whole, or the context is computed again; nothing else is lost, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_sender
import numpy as np
import pytest

from libra.errors import EngineError, KVRefused, TransportError
from libra.rollout import TransformersEngine
from libra.transport import new_secret
from libra.types import TurnOutput, TurnRequest
from libra.worker import kv_transfer
from libra.worker.kv_transfer import KVTransfers, ask

SECRET = new_secret()
LIMIT = 2**26


@pytest.fixture
def sender(repository: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], tuple[str, int]]]]:
    """``sender(how)``: a process that gives KV, and its address."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], tuple[str, int]]:
        command = [sys.executable, kv_sender.__file__, SECRET, how]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(repository)}
        )
        started.append(process)
        assert process.stdout is not None
        return process, ("127.0.0.1", int(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_arrives_whole_and_the_sender_is_told(sender):
    process, address = sender("good")
    kv = ask(address, SECRET, "a", 0, LIMIT)
    assert kv.header() == kv_sender.KV.header()
    assert kv.data.tobytes() == kv_sender.KV.data.tobytes()
    assert process.stdout.readline() == "kept\n"


@pytest.mark.parametrize(
    ("how", "asked", "error"),
    [
        ("corrupt", {}, "checksum"),
        ("truncated", {}, r"4194300 bytes arrived of 4194304"),
        ("good", {"limit_bytes": 1000}, "are more than the pool of 1000"),
        ("good", {"version": 1}, "version 0 came for a, 1"),
        ("good", {"trajectory_id": "b"}, "KV of a, version 0 came for b"),
    ],
)
def test_what_is_not_what_was_asked_for_is_refused(sender, how, asked, error):
    process, address = sender(how)
    with pytest.raises(KVRefused, match=error):
        ask(address, SECRET, **({"trajectory_id": "a", "version": 0, "limit_bytes": LIMIT} | asked))
    if how == "good":
        assert process.stdout.readline() == "not kept\n"


def test_a_stranger_gets_none(sender):
    _, address = sender("good")
    with pytest.raises(TransportError):
        ask(address, new_secret(), "a", 0, LIMIT)


class Home:
    """One engine with what a worker has around it; ``reports`` are those it sent."""

    def __init__(self, model: Path) -> None:
        self.engine = TransformersEngine(model, slots=2, max_context_tokens=256, threads=1, host_kv_gib=0.1)
        self.asleep, self.out = False, None
        self.reports: list[Any] = []

    async def generate(self, request: TurnRequest) -> TurnOutput:
        return await self.engine.generate(request)

    def forget(self, trajectory_id: str) -> None:
        self.engine.forget(trajectory_id)

    async def start(self) -> KVTransfers:
        await self.engine.start()
        context = SimpleNamespace(
            address="tcp://127.0.0.1:1", name="w", spec=SimpleNamespace(secret=SECRET), report=self.reports.append
        )
        return KVTransfers(context, self, LIMIT)


def request(turn: int, context: list[int]) -> TurnRequest:
    return TurnRequest("a", turn, np.array(context, np.int32), 8, seed=turn)


def moved(model: Path, home_of: Callable[[KVTransfers], Any], before: Callable[[Home], Any] = lambda home: None) -> Any:
    """Turn 0 at home, turn 1 on another engine; its output, its report, and whether home still has the KV.

    ``home_of`` gives the address that is announced for the move.
    """

    async def run() -> Any:
        home, other = Home(model), Home(model)
        transfers = [await each.start() for each in (home, other)]
        try:
            first = await transfers[0].generate("key", request(0, list(range(40))))
            assert not home.reports
            await asyncio.gather(*filter(None, [before(home)]))
            transfers[1].announced("key", home_of(transfers[0]))
            context = [*range(40), *first.token_ids.tolist(), 1, 2, 3]
            second = await transfers[1].generate("key", request(1, context))
            closed = home.engine._closing
            if not closed:
                await home.engine.pause()  # what was posted before has been handled
            return second, other.reports, None if closed else home.engine.stats().retained
        finally:
            for each, transfer in zip((home, other), transfers, strict=True):
                transfer.close()
                await each.engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_a_turn_continues_from_what_the_old_home_had(random_model):
    output, (report,), kept = moved(random_model, lambda home: home.address)
    assert output.cached_tokens == 47
    assert (report.key, report.refused) == ("key", "")
    assert report.num_bytes > 0 and report.took_s > 0
    assert kept == 0, "the old home freed it"
    anew, (report,), kept = moved(random_model, lambda home: None)
    assert anew.token_ids.tolist() == output.token_ids.tolist()
    assert (anew.cached_tokens, report.num_bytes, report.refused, kept) == (0, 0, "", 1)
    assert report.took_s == pytest.approx(anew.prefill_s, abs=1e-6)
    assert 0 < anew.prefill_s < anew.busy_s


def test_stale_kv_and_kv_that_is_gone_are_computed_again(random_model, tmp_path):
    anew, _, _ = moved(random_model, lambda home: None)

    async def newer(home: Home) -> None:
        await home.engine.load_version(1, random_model)
        home.engine.forget("nobody")
        await home.engine.generate(request(1, list(range(30))))  # KV of version 1

    async def out(home: Home) -> None:
        home.out = EngineError("it disagreed with its version")

    for before, why in (
        (newer, "it is of version 1, needed is 0"),
        (lambda home: home.engine.abort("a"), "w has no KV of a"),
        (out, "it is out of service"),
    ):
        output, (report,), _ = moved(random_model, lambda home: home.address, before)
        assert why in report.refused
        assert (report.num_bytes, output.cached_tokens) == (0, 0)
        assert output.token_ids.tolist() == anew.token_ids.tolist()
        assert output.logprobs.tobytes() == anew.logprobs.tobytes()


def test_an_engine_that_sleeps_leaves_its_kv_to_others(random_model):
    async def asleep(home: Home) -> None:
        await home.engine.park_kv()
        await home.engine.close()

    output, (report,), _ = moved(random_model, lambda home: home.address, asleep)
    assert (output.cached_tokens, report.refused) == (47, "")
    anew, _, _ = moved(random_model, lambda home: None)
    assert output.token_ids.tolist() == anew.token_ids.tolist()


def test_a_sender_that_is_killed_in_mid_transfer_costs_a_prefill_and_nothing_else(random_model, sender):
    anew, _, _ = moved(random_model, lambda home: None)
    process, address = sender("half")

    def kill() -> None:
        process.stdout.readline()  # half of the bytes are sent
        os.kill(process.pid, signal.SIGKILL)

    def home_of(home: KVTransfers) -> Any:
        asyncio.get_running_loop().run_in_executor(None, kill)
        return address

    output, (report,), kept = moved(random_model, home_of)
    assert report.refused and not report.num_bytes
    assert output.token_ids.tolist() == anew.token_ids.tolist()
    assert output.logprobs.tobytes() == anew.logprobs.tobytes()
    assert kept == 1, "the real home keeps its own"


class Accepting:
    """A home that is stopped: its kernel accepts connections, and nobody answers; ``connections`` to it."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self.connections.append(self._socket.accept()[0])

    def close(self) -> None:
        for each in (self._socket, *self.connections):
            each.close()


def test_a_home_that_is_stopped_is_given_up_once_and_holds_up_nobody_else(sender, monkeypatch):
    """Six trajectories have their KV there at once; those that come later do not wait, and another home's arrives."""
    reports: list[Any] = []

    async def generate(request: TurnRequest) -> Any:
        return SimpleNamespace(cached_tokens=kv_sender.KV.num_tokens, prefill_s=0.0)

    async def import_kv(kv: Any) -> bool:
        return True

    async def run(stopped: Accepting) -> None:
        context = SimpleNamespace(
            address="tcp://127.0.0.1:1", name="w", spec=SimpleNamespace(secret=SECRET), report=reports.append
        )
        engine = SimpleNamespace(version=0, import_kv=import_kv)
        transfers = KVTransfers(context, SimpleNamespace(engine=engine, generate=generate), LIMIT)
        try:
            monkeypatch.setattr(kv_transfer, "GIVE_UP_S", 1.0)
            for number in range(6):
                transfers.announced(f"early {number}", stopped.address)
            await asyncio.gather(*(transfers.generate(f"early {n}", request(1, [0])) for n in range(6)))
            monkeypatch.setattr(kv_transfer, "GIVE_UP_S", 100.0)
            transfers.announced("late", stopped.address)
            await transfers.generate("late", request(1, [0]))
            transfers.announced("good", sender("good")[1])
            await transfers.generate("good", request(1, [0]))
        finally:
            transfers.close()

    with contextlib.closing(Accepting()) as stopped:
        asyncio.run(asyncio.wait_for(run(stopped), 90))
        assert len(stopped.connections) == kv_transfer.ASKED_OF_ONE
    *early, late, good = reports
    assert len(early) == 6 and all("answer within" in report.refused and not report.num_bytes for report in early)
    assert late.refused.endswith("did not answer within the last 30 s")
    assert (good.key, good.refused, good.num_bytes) == ("good", "", kv_sender.KV.num_bytes)
