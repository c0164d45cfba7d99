"""Streamed steps, live: the batches and the weights of a run that does not stream, and nothing lost or repeated by a kill."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from distributed import Client
from streamed_runs import check_taken_again, check_whole, events_of, replayed_differences, waves_of

from libra.cli.main import cli
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, dump_config
from libra.driver import run_checkpoints
from libra.driver.session import Session, run
from libra.envs import tool
from libra.events import WaveOpened, WaveTrained, WorkerLost
from libra.store.trajectories import TrajectoryStore
from libra.store.wave_records import groups_of, read_waves
from libra.testing import FixedTurns
from libra.types import ToolCall
from libra.weights import WeightStore

Config = Callable[..., RunConfig]
PROMPTS = 6


def weights_of(directory: Path, version: int) -> dict[str, torch.Tensor]:
    store = WeightStore(directory / "weights")
    return store.read(store.get(version))


def typed(*arguments: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("eta", [0, 1])
def test_a_streamed_run_has_the_batches_and_the_weights_of_one_that_is_not(
    eta: int, make_config: Config, client: Client
) -> None:
    trainer = {"prompts": PROMPTS, "group_size": 3, "lr": 1e-4}
    done = {
        streaming: run(
            make_config(
                run={"name": f"streaming_{streaming}", "iterations": 2, "eta": eta},
                trainer={**trainer, "streaming": streaming},
                store={"keep_versions": 9},
            ),
            client=client,
        )
        for streaming in ("off", "on")
    }
    off, on = (done[name].directory for name in ("off", "on"))
    for batch in range(2):
        waves = waves_of(on, batch)
        if batch == 0 or eta == 0:  # with a bound above 0 a later batch may be complete before its step begins
            assert len(waves) > 1 and len(waves[0]) < PROMPTS  # the first opens with the first group
        assert sorted(group for wave in waves for group in wave) == [(batch, g) for g in range(PROMPTS)]
        assert waves_of(off, batch) == []
    for weight, other in zip(weights_of(on, 1).values(), weights_of(off, 1).values(), strict=True):
        assert torch.allclose(weight, other, rtol=0, atol=2e-6)
    assert any(not torch.equal(weights_of(on, 1)[name], weight) for name, weight in weights_of(on, 0).items()), (
        "nothing was learned"
    )
    for values, plain in zip(done["on"].iterations, done["off"].iterations, strict=True):
        assert values["waves"] == len(waves_of(on, int(values["iteration"])))
        early = values["iteration"] == 0 or eta == 0
        assert (
            0 < values["streamed_frac"] < 1 if early else 0 <= values["streamed_frac"] <= 1
        ) and "waves" not in plain
        assert values["sequences"] == plain["sequences"] == PROMPTS * 3
        assert values["lag_max"] <= eta
    events = events_of(on)
    trained = [event for event in events if isinstance(event, WaveTrained)]
    assert [(e.batch, e.wave) for e in trained] == [(k, j) for k in range(2) for j in range(len(waves_of(on, k)))]
    assert all(sum(e.groups for e in trained if e.batch == k) == PROMPTS for k in range(2))
    assert [e.missing for e in trained if e.batch == 0][-1] == 0 < trained[0].missing
    assert replayed_differences(events) == []
    with TrajectoryStore.open(on / "trajectories.zarr", mode="r") as stored:
        assert stored.num_trajectories == 2 * PROMPTS * 3
    history = typed("replay", str(on), "--key", "batch-1")
    assert "wave 0 of batch 1 opens with " in history and "groups trained in" in history
    assert json.loads(typed("inspect", str(on), "--iteration", "1", "--json").splitlines()[0])


# ------------------------------------------------------------------------------------------------ kills


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group records stay, so that every step can be taken again."""
    monkeypatch.setattr(run_checkpoints, "prune_groups", lambda spec, first, before: before)


def dies_in_a_wave(run: str, wave: int, dask_worker: Any, step: int = 2) -> None:
    """From now on this worker is killed in the midst of that wave of a step that is not an earlier one."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss = replica.gradient.micro_batch_loss

    def deadly(*arguments: Any) -> Any:
        if replica.open_step.step >= step and replica.open_step.waves == wave:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*arguments)

    replica.gradient.micro_batch_loss = deadly


STREAMED = {"prompts": PROMPTS, "group_size": 2, "lr": 1e-3, "streaming": "on"}


class LateFirst(FixedTurns):
    """Each action of group 0 of iteration 0 takes a byte from a pipe first."""

    def __init__(self, pipe: Path) -> None:
        super().__init__()

        def take() -> None:
            end = os.open(pipe, os.O_RDONLY)
            os.read(end, 1)
            os.close(end)

        async def wait(text: str, action_id: str = "") -> str:
            """Wait.

            Args:
                text: What is returned.
            """
            import asyncio

            if action_id.startswith("train-0-0-"):
                await asyncio.to_thread(take)
            return text

        self.tools = (tool(wait, timeout_s=300),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("wait", {"text": "y"}),)


@pytest.mark.timeout(600)
def test_a_batch_takes_what_is_complete_first_and_a_killed_trainer_adds_the_same_groups_again(
    make_config: Config, client: Client, kept: None, tmp_path: Path
) -> None:
    config = make_config(
        run={"iterations": 4, "eta": 1}, trainer={**STREAMED, "batches": "first_come"}, store={"keep_versions": 9},
        checkpoint={"every": 0},
    )  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    with Session(config, environment=LateFirst(tmp_path / "pipe"), client=client) as session:
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == "train-0")
        iterations = session.iterations()
        next(iterations)  # its batch does not wait for the group
        session.client.run(dies_in_a_wave, run="demo", wave=0, step=1, workers=[address])
        os.write(pipe, b"g" * 64)
        list(iterations)
    os.close(pipe)
    directory, events = session.directory, events_of(session.directory)
    assert [event.address for event in events if isinstance(event, WorkerLost)] == [address]
    first = [group for wave in waves_of(directory, 0) for group in wave]
    assert (0, 0) not in first and any(iteration == 1 for iteration, _ in first)
    assert (0, 0) in [group for wave in waves_of(directory, 1) for group in wave]  # at its deadline
    opened = [event.reason for event in events if isinstance(event, WaveOpened) and event.batch == 0]
    assert any("of other iterations" in reason for reason in opened)
    check_whole(directory, 4, config)
    check_taken_again(directory, config, 4)


@pytest.mark.timeout(600)
def test_a_trainer_that_is_killed_in_the_midst_of_a_wave_adds_the_committed_waves_again(
    make_config: Config, client: Client, kept: None
) -> None:
    config = make_config(run={"iterations": 4}, trainer=STREAMED, store={"keep_versions": 9}, checkpoint={"every": 0})
    with Session(config, client=client) as session:
        iterations = session.iterations()
        next(iterations)
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == "train-0")
        session.client.run(dies_in_a_wave, run="demo", wave=1, workers=[address])
        list(iterations)
    events = events_of(session.directory)
    assert [event.address for event in events if isinstance(event, WorkerLost)] == [address]
    trained = Counter((e.batch, e.wave) for e in events if isinstance(e, WaveTrained))
    assert trained[2, 0] == 2 and trained[2, 1] >= 1  # the first wave was lost with its trainer
    check_whole(session.directory, 4, config)
    check_taken_again(session.directory, config, 4)


DRIVER = """
import pickle, sys
from pathlib import Path
from distributed import Client
from libra.cluster.present_workers import present_workers
from libra.config import load_config
from libra.driver.session import Session

def stops_in_a_wave(run, pipe, wave, dask_worker):
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss = replica.gradient.micro_batch_loss
    def held(*arguments):
        if replica.open_step.step == 2 and replica.open_step.waves == wave:
            Path(pipe).write_text("in the wave")
            Path(pipe).read_text()
        return loss(*arguments)
    replica.gradient.micro_batch_loss = held

def main():
    config = load_config(sys.argv[1])
    security = pickle.loads(Path(sys.argv[4]).read_bytes())
    with Client(sys.argv[2], security=security) as client, Session(config, client=client) as session:
        iterations = session.iterations()
        next(iterations)
        workers = present_workers(client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == "train-0")
        client.run(stops_in_a_wave, run="demo", pipe=sys.argv[3], wave=int(sys.argv[5]), workers=[address])
        list(iterations)

try:
    main()
    raise RuntimeError("no wave was held")
except BaseException as error:
    Path(sys.argv[3]).write_text(f"the driver ended: {error!r}")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("eta", "batches", "wave"), [(0, "own", 1), (1, "first_come", 0)])
def test_a_driver_that_is_killed_in_the_midst_of_a_wave_goes_on_with_the_committed_waves(
    eta: int, batches: str, wave: int, make_config: Config, client: Client, kept: None, tmp_path: Path
) -> None:
    config = make_config(
        run={"iterations": 4, "eta": eta}, trainer={**STREAMED, "batches": batches}, store={"keep_versions": 9},
        checkpoint={"every": 0},
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_config(config))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "security").write_bytes(pickle.dumps(client.security))
    address, security = client.scheduler.address, tmp_path / "security"
    given = (
        tmp_path / "config.yaml",
        address,
        tmp_path / "pipe",
        security,
        wave,
    )  # with eta 1 a step may have one wave only
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *map(str, given)])
    assert (tmp_path / "pipe").read_text() == "in the wave"
    directory = tmp_path / "demo"
    committed = [groups_of(wave) for wave in read_waves(directory / "waves", 2)]
    assert len(committed) > wave and not (directory / "batches" / "batch-000002.json").exists()
    driver.kill()
    driver.wait()
    (tmp_path / "pipe").write_text("go on")
    summary = run(config, client=client, resume=True)
    taken = [values["iteration"] for values in summary.iterations]
    assert taken in ([2, 3], [3])  # where the scheduler lives on, step 2 may be over before the run is removed
    assert waves_of(directory, 2)[: len(committed)] == committed
    check_whole(directory, 4, config)
    check_taken_again(directory, config, 4)
