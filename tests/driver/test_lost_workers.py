"""Workers that stop, come back or die in the middle of a quantum: one record per quantum, and the trajectory finishes."""

import asyncio
import os
import select
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import whole_run
from distributed import Nanny, Scheduler
from distributed.core import Status

from libra import keys
from libra.cluster.present_workers import present_workers
from libra.driver.session import Session
from libra.envs import tool
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.types import ToolCall

pytestmark = pytest.mark.live


@pytest.fixture
def pipe(tmp_path):
    """Maker of named pipes: opening one end waits for the other, so nobody polls."""

    def make(name):
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def to_continue():
    """Processes that get SIGCONT at the end, however the test ends: a stopped one could not be closed."""
    processes: list[int] = []
    yield processes
    for process in processes:
        try:
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:
            continue


def stop_once(run: str, first: Path, stopped: Path, go: Path, outcome: Path, dask_worker: Any) -> None:
    """Hold up one generation, on whichever worker is first, between its tokens and its record; tell how the record went."""
    host = dask_worker.plugins[f"libra-{run}"]
    engine, journal = host.engine.serving.engine, host.context.journal
    generate, append = engine.generate, journal.append
    mine = threading.Event()

    async def held_up(request: Any) -> Any:
        output = await generate(request)
        try:
            os.close(os.open(first, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return output
        mine.set()
        stopped.write_text(f"{os.getpid()} {dask_worker.address} {request.trajectory_id}")  # noqa: ASYNC240
        go.read_text()  # noqa: ASYNC240  nothing else of this worker runs before the record is written
        return output

    def told(name: str, quantum: int, record: Any) -> None:
        how = "written"
        try:
            append(name, quantum, record)
        except Exception as error:
            how = type(error).__name__
            raise
        finally:
            if mine.is_set():
                mine.clear()
                outcome.write_text(f"{how} {name} {quantum}")

    engine.generate, journal.append = held_up, told


def test_a_worker_that_comes_back_after_its_trajectory_went_elsewhere_writes_nothing(
    make_config, pipe, tmp_path, to_continue
):
    # Its own cluster: a worker is taken from its scheduler, and ends by itself.
    config = make_config(
        run={"iterations": 3},
        cluster={"rollout_workers": 2, "threads": 1, "dashboard_port": 0},
        store={"keep_journals": True},
    )
    stopped, go, outcome = pipe("stopped"), pipe("go"), pipe("outcome")

    def stop_and_remove() -> tuple[int, int, str, str]:
        process, address, trajectory = stopped.read_text().split()
        to_continue.append(int(process))
        watch = os.pidfd_open(int(process))
        os.kill(int(process), signal.SIGSTOP)

        async def remove(dask_scheduler: Scheduler) -> None:
            await dask_scheduler.remove_worker(address, stimulus_id="silent-for-too-long")  # what worker-ttl does

        session.client.run_on_scheduler(remove)
        return int(process), watch, address, trajectory

    with Session(config) as session, ThreadPoolExecutor(1) as thread:
        found = present_workers(session.client)
        rollout = [address for address, worker in found.items() if worker["name"].startswith("rollout")]
        assert len(rollout) == 2
        session.client.run(stop_once, "demo", tmp_path / "first", stopped, go, outcome, workers=rollout)
        removal = thread.submit(stop_and_remove)
        iterations = session.iterations()
        next(iterations)  # the trajectory went on elsewhere: its group is in the batch of this step
        process, watch, address, trajectory = removal.result()
        os.kill(process, signal.SIGCONT)
        go.write_text("go")
        assert outcome.read_text() == f"RecordExists {trajectory} 0"
        select.select([watch], [], [])  # it ends by itself
        os.close(watch)
        assert len(list(iterations)) == 2

    directory = session.directory
    whole_run.check_once(directory, 3)
    assert len(whole_run.journal_records(directory)) == 3 * 4 * 5
    lost = [e for e in whole_run.events_of(directory, "quantum_lost") if e["address"] == address]
    assert trajectory in {"-".join(map(str, ("train", *keys.parse(e["key"]).indices))) for e in lost}  # type: ignore[union-attr]


KILLS = 5


class Asks(FixedTurns):
    """Its tool says on a pipe that it runs, and waits to be told to go on: at the first attempt of each turn."""

    def __init__(self, directory: Path) -> None:
        super().__init__()

        async def ask(text: str, action_id: str = "") -> str:
            """Ask.

            Args:
                text: What.
            """
            try:
                (directory / f"turn-{action_id.split('/')[1]}").touch(exist_ok=False)
            except FileExistsError:
                return text
            (directory / "running").write_text(f"{os.getpid()} {action_id}")
            (directory / "go").read_text()
            return text

        self.tools = (tool(ask, timeout_s=120),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("ask", {"text": "y"}),)


Asks.__module__ = "__main__"


def test_a_trajectory_survives_five_worker_kills_at_five_quanta(make_config, client, pipe, tmp_path):
    config = make_config(
        run={"iterations": 1}, rollout={"max_turns": KILLS + 1}, trainer={"prompts": 1, "group_size": 1,
        "normalize_std": False, "resample": 0}, store={"keep_journals": True},
    )  # fmt: skip
    running, _ = pipe("running"), pipe("go")  # nobody ever says go: the worker is killed there
    killed: list[str] = []

    cluster: Any = client.cluster
    with Session(config, environment=Asks(tmp_path), client=client) as session, ThreadPoolExecutor(1) as thread:
        nanny: Nanny = cluster.workers["tool-0"]

        async def heard() -> None:
            # Before its nanny has heard that it joined, Dask does not restart a worker that dies. It has no event for this.
            while nanny.status is not Status.running:  # noqa: ASYNC110
                await asyncio.sleep(0)

        def kill() -> None:
            for _ in range(KILLS):
                process, action = running.read_text().split()
                cluster.sync(heard)
                killed.append(action)
                os.kill(int(process), signal.SIGKILL)

        kills = thread.submit(kill)
        (values,) = session.iterations()
        kills.result()

    assert killed == [f"train-0-0-0/{turn}/0" for turn in range(KILLS)]
    assert values["left_out"] == 0 and values["resampled"] == 0
    records = Journal(session.directory / "journal").read("train-0-0-0")
    assert [record["kind"] for record in records] == ["generation", "action"] * KILLS + ["generation"]
    assert [e["quantum"] for e in whole_run.events_of(session.directory, "quantum_lost")] == [1, 3, 5, 7, 9]
    done = Counter(e["quantum"] for e in whole_run.events_of(session.directory, "quantum_finished"))
    assert done == dict.fromkeys(range(2 * KILLS + 1), 1)
