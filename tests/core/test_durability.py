"""Nothing that was committed is lost or done twice, whatever is killed, interrupted or full.

README ("it loses nothing"), docs/durability.md, docs/failures.md. A damaged record is in tests/hostile.
"""

import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import whole_run
from distributed import Client
from killed_engine import kill_at_generation
from streamed_runs import check_taken_again

from libra.config import dump_config
from libra.driver import submitted_graphs
from libra.driver.run_session import Session, run
from libra.envs import tool
from libra.errors import ClusterError, LibraError
from libra.store.start_records import newest_epoch
from libra.testing import FixedTurns
from libra.types import ToolCall

pytestmark = pytest.mark.core

ITERATIONS = 3


# ------------------------------------------------------------------------------------------------ kill -9 of workers


def die_in_step(run, step, dask_worker):
    """On the trainer: it is killed in the midst of a step."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss = replica.gradient.micro_batch_loss

    def deadly(*arguments: Any) -> Any:
        if replica.steps_done == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*arguments)

    replica.gradient.micro_batch_loss = deadly


die_in_step.__module__ = "__main__"


def test_kill_9_of_each_kind_of_worker_loses_and_repeats_nothing(
    make_config, client, worker_address, tmp_path, monkeypatch
):
    monkeypatch.setattr(submitted_graphs, "prune_groups", lambda spec, first, before: before)  # they are taken again
    struck = tmp_path / "tool-0 was struck"

    class Deadly(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def act(text: str, action_id: str = "") -> str:
                """Kill the worker, at one action.

                Args:
                    text: What is returned.
                """
                if action_id.startswith("train-1-0-0/1") and not struck.exists():
                    struck.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return text

            self.tools = (tool(act),)

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("act", {"text": "y"}),)

    config = make_config(
        run={"iterations": 4}, store={"keep_versions": 9, "keep_journals": True}, checkpoint={"every": 0}
    )
    with Session(config, environment=Deadly(), client=client) as session:
        iterations = session.iterations()
        next(iterations)
        flag = tmp_path / "rollout-0 was struck"
        client.run(kill_at_generation, "demo", 1, flag, workers=[worker_address("rollout-0")])
        client.run(die_in_step, "demo", 3, workers=[worker_address("train-0")])
        assert len(list(iterations)) == 3
    directory = session.directory
    whole_run.check_once(directory, 4)
    assert len({event["address"] for event in whole_run.events_of(directory, "worker_lost")}) == 3
    assert whole_run.events_of(directory, "quantum_lost")
    assert len(whole_run.journal_records(directory)) == 4 * 4 * 5
    check_taken_again(directory, config, 4)


# ------------------------------------------------------------------------------- kill -9 of driver and scheduler, Ctrl-C


class Gate:
    """A pipe that a tool of `held_tool.Held` reads: `reached` returns once it does, and holds it there; `open` lets it go on."""

    def __init__(self, path):
        self.path = path
        os.mkfifo(path)

    def reached(self):
        self.end = self.path.open("w")

    def open(self):
        self.path.unlink()
        self.path.touch()  # who comes again does not wait
        self.end.close()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def held(make_config, gate):
    """A run with the first action of iteration 1 held up."""
    return make_config(
        run={"iterations": ITERATIONS},
        environment={"name": "held_tool:Held", "args": {"gate": str(gate.path), "held": "train-1-0-0"}},
        store={"keep_journals": True},
    )


def check_goes_on(directory, config, client):
    """Resumed, the run is whole, and what was in the journal before is there as it was."""
    before = whole_run.journal_records(directory)
    assert before and not (directory / "batches" / "batch-000001.json").exists()
    summary = run(config, client=client, resume=True)
    assert [values["iteration"] for values in summary.iterations] == list(range(1, ITERATIONS))
    assert newest_epoch(directory / "epochs") == 1
    whole_run.check_once(directory, ITERATIONS)
    after = whole_run.journal_records(directory)
    assert before.items() <= after.items() and len(after) == ITERATIONS * 4 * 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_killed_or_interrupted_goes_on(how, held, gate, client, tmp_path):
    (tmp_path / "held.yaml").write_text(dump_config(held))
    (tmp_path / "security").write_bytes(pickle.dumps(client.security))
    script = Path(__file__).resolve().parents[1] / "support" / "own_driver.py"
    given = (script, tmp_path / "held.yaml", client.scheduler.address, tmp_path / "security")
    driver = subprocess.Popen([sys.executable, *map(str, given)], stderr=subprocess.PIPE, text=True)
    gate.reached()
    driver.send_signal(how)
    _, said = driver.communicate()
    gate.open()
    directory = tmp_path / "demo"
    assert driver.returncode == -how
    if how is signal.SIGINT:
        assert said.splitlines()[-1] == f"libra resume {directory}"
        assert "Traceback" not in said and "after 1 of 3 iterations" in said
    check_goes_on(directory, held, client)


def test_kill_9_of_the_scheduler_ends_the_driver_with_what_to_type_and_the_run_goes_on(held, gate, client, tmp_path):
    (tmp_path / "held.yaml").write_text(dump_config(held))
    script = Path(__file__).resolve().parents[1] / "support" / "own_scheduler.py"
    command = [sys.executable, str(script), str(tmp_path / "held.yaml"), str(tmp_path / "security")]
    scheduler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().strip()

    def kill() -> None:
        gate.reached()
        scheduler.kill()
        scheduler.wait()

    try:
        security = pickle.loads((tmp_path / "security").read_bytes())
        own = Client(address, security=security, timeout=3, set_as_default=False)
        with ThreadPoolExecutor(1) as thread:
            killed = thread.submit(kill)
            with pytest.raises(ClusterError, match="libra resume"):
                run(held, client=own)
            killed.result()
        with suppress(ValueError):  # tornado 6.6.1 raises it where a client that reconnects is closed
            own.close()
    finally:
        os.killpg(scheduler.pid, signal.SIGKILL)  # its workers
    gate.open()
    check_goes_on(tmp_path / "demo", held, client)


# ------------------------------------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB; skipped where this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here (root can): {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(directory):
    """A file that takes every byte that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(small_disk, make_config, client):
    config = make_config(run={"dir": str(small_disk), "iterations": 6, "eta": 1})
    calls = {"on_iteration": lambda values: fill(small_disk) if values["iteration"] == 1 else None}
    with pytest.raises(LibraError, match="disk full"):
        run(config, client=client, callbacks=calls)
    (small_disk / "filler").unlink()
    summary = run(config, client=client, resume=True)
    assert summary.iterations[-1]["iteration"] == 5
    whole_run.check_once(small_disk / "demo", 6)
