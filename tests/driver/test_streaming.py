"""Streamed steps lose and repeat nothing where a trainer is killed in a wave.

That a streamed step is the whole step is in tests/core/test_scheduling.py.
"""

import os
from pathlib import Path

import pytest
from streamed_runs import check_taken_again, check_whole, events_of, waves_of
from whole_run import address_of, dies_in_a_wave, keep_groups

from libra.driver.run_session import Session
from libra.envs import tool
from libra.facts import OpenWave, WorkerLost
from libra.testing import FixedTurns
from libra.types import ToolCall

PROMPTS = 6

pytestmark = pytest.mark.live


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


def test_a_killed_trainer_adds_the_same_first_come_groups_again(make_config, client, tmp_path, monkeypatch):
    keep_groups(monkeypatch)
    config = make_config(
        run={"iterations": 4, "eta": 1}, trainer={**STREAMED, "batches": "first_come"}, store={"keep_versions": 9},
        checkpoint={"every": 0},
    )  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    with Session(config, environment=LateFirst(tmp_path / "pipe"), client=client) as session:
        address = address_of(client, "train-0")
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
    opened = [event.reason for event in events if isinstance(event, OpenWave) and event.batch == 0]
    assert any("of other iterations" in reason for reason in opened)
    check_whole(directory, 4, config)
    check_taken_again(directory, config, 4)
