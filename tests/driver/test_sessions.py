"""Runs whose trajectories lease a live process each: pinned to a worker, reset, reused, and lost."""

import os
import signal
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import libra
from libra.cluster.local import local_cluster
from libra.config import RunConfig
from libra.driver.run_session import run
from libra.envs import tool
from libra.errors import ConfigError
from libra.observe.metrics import read_metrics
from libra.store.trajectory_store import TrajectoryStore
from libra.testing import FixedTurns
from libra.types import ToolCall

ITERATIONS, MEMBERS = 3, 8
VICTIM = "train-1-0-2"


class Shell:
    """It counts how often it was asked since it was reset, and stands for a process or a browser that can end."""

    def __init__(self) -> None:
        self.name, self.count, self.is_alive = uuid.uuid4().hex, 0, True

    def reset(self) -> None:
        self.count = 0


class Shells(FixedTurns):
    """Every turn calls `look`, which notes in ``notes``/TRAJECTORY what its session said. In the second turn of `VICTIM`
    its worker (``kill`` worker) or its session is killed, once."""

    session = libra.session(Shell, reset=Shell.reset, alive=lambda shell: shell.is_alive)

    def __init__(self, notes: Path, kill: str) -> None:
        super().__init__()
        self.notes, self.kill = notes, kill
        self.tools = (tool(self.look),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("look", {}),)

    def look(self, session: Shell, action_id: str) -> str:
        """Ask the session.

        Returns:
            How often it was asked.
        """
        trajectory, turn, _ = action_id.split("/")
        session.count += 1
        self.notes.mkdir(exist_ok=True)
        with (self.notes / trajectory).open("a") as file:
            file.write(f"{turn} {session.count} {session.name} {os.getpid()}\n")
        if (trajectory, turn) == (VICTIM, "1"):
            if self.kill == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            session.is_alive = False
        return str(session.count)


for _sent in (Shell, Shells):
    _sent.__module__ = "__main__"  # by value to the workers, which cannot import this file


def configured(make_config: Callable[..., RunConfig]) -> RunConfig:
    """A run of trajectories of four turns, three of them with an action."""
    sections = {"rollout": {"max_turns": 4}, "trainer": {"prompts": 2, "group_size": 4}}
    return make_config(run={"iterations": ITERATIONS}, cluster={"tool_workers": 2}, **sections)


def check_begins_again(directory: Path, notes: dict[str, list[list[str]]]) -> None:
    """The loss is an infrastructure failure of one trajectory, which has another session then."""
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        rows = {name: np.array(values) for name, values in store.columns().items()}
    place = (rows["iteration"] == 1) & (rows["group"] == 0) & (rows["sample"] == 2)
    assert rows["retried"][place].tolist() == ["worker"]
    assert set(rows["failure"]) == {"policy"}  # four turns, and still calling: the model's own
    assert np.isfinite(rows["reward"]).all() and len(rows["reward"]) == ITERATIONS * MEMBERS
    again = notes[f"{VICTIM}.1"]
    assert [line[:2] for line in again] == [["0", "1"], ["1", "2"], ["2", "3"]]
    assert {line[2] for line in again}.isdisjoint({line[2] for line in notes[VICTIM]})


def read_notes(notes: Path) -> dict[str, list[list[str]]]:
    """Of each trajectory: turn, how often the session was asked, its name, and the process of its worker."""
    return {path.name: [line.split() for line in path.read_text().splitlines()] for path in notes.iterdir()}


@pytest.mark.live
def test_a_trajectory_keeps_one_session_and_begins_again_with_another_when_its_worker_dies(make_config, tmp_path):
    config = configured(make_config)
    with local_cluster(config) as cluster, Client(cluster) as client:  # the shared ones have one tool worker
        directory = run(config, environment=Shells(tmp_path / "notes", "worker"), client=client).directory
    notes = read_notes(tmp_path / "notes")
    whole = {name: lines for name, lines in notes.items() if len(lines) == 3}
    assert len(whole) >= ITERATIONS * MEMBERS
    for lines in whole.values():
        assert [line[:2] for line in lines] == [["0", "1"], ["1", "2"], ["2", "3"]]
        assert len({line[2] for line in lines}) == 1 == len({line[3] for line in lines})
    of_session = Counter(lines[0][2] for lines in notes.values())
    assert len(of_session) < len(notes) and len({lines[0][3] for lines in notes.values()}) >= 2
    by_iteration = [{lines[0][2] for name, lines in notes.items() if name.startswith(f"train-{k}-")} for k in (0, 2)]
    assert by_iteration[0] & by_iteration[1], "sessions outlive iterations"
    check_begins_again(directory, notes)


def test_a_session_that_dies_is_replaced(make_config, client, tmp_path):
    environment = Shells(tmp_path / "notes", "session")
    directory = run(configured(make_config), environment=environment, client=client).directory
    notes = read_notes(tmp_path / "notes")
    check_begins_again(directory, notes)
    last = read_metrics(directory)[-1]
    assert last["sessions_made"] == len({lines[0][2] for lines in notes.values()})
    assert last["sessions_made"] + last["sessions_reused"] == len(notes) and last["sessions_reused"] > 0
    assert last["sessions_reused"] <= last["sessions_resets"]


def test_functions_as_tools_have_a_session_if_one_takes_it_and_only_then(random_model, tmp_path):
    def asked(session: list[int]) -> str:
        """Ask the session."""
        return str(session)

    given: dict[str, Any] = {"model": str(random_model), "prompts": ["go"], "reward": lambda completion: 1.0}
    for changes in ({"tools": [asked]}, {"session": libra.session(list), "tools": []}):
        with pytest.raises(ConfigError, match="session"):
            libra.train(**given | changes, run__dir=str(tmp_path))
