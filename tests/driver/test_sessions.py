"""Runs whose trajectories lease a live process each: pinned to a worker, reset, reused, and lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shells
from distributed import Client

import libra
from libra.cluster.local import local_cluster
from libra.config import RunConfig
from libra.driver.session import run
from libra.errors import ConfigError
from libra.observe.metrics import read_metrics
from libra.store.trajectories import TrajectoryStore

ITERATIONS, MEMBERS = 3, 8


def configured(make_config: Callable[..., RunConfig], notes: Path, **args: str) -> RunConfig:
    """A run of trajectories of four turns, three of them with an action."""
    notes.mkdir()
    return make_config(
        run={"iterations": ITERATIONS},
        environment={"name": "shells:Shells", "args": {"notes": str(notes), **args}},
        rollout={"max_turns": 4},
        trainer={"prompts": 2, "group_size": 4},
        cluster={"tool_workers": 2},
    )


def check_begins_again(directory: Path, notes: dict[str, list[list[str]]], victim: str) -> None:
    """The loss is an infrastructure failure of one trajectory, which has another session then."""
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        rows = {name: np.array(values) for name, values in store.columns().items()}
    place = (rows["iteration"] == 1) & (rows["group"] == 0) & (rows["sample"] == 2)
    assert rows["retried"][place].tolist() == ["worker"]
    assert set(rows["failure"]) == {"policy"}  # four turns, and still calling: the model's own
    assert np.isfinite(rows["reward"]).all() and len(rows["reward"]) == ITERATIONS * MEMBERS
    again = notes[f"{victim}.1"]
    assert [line[:2] for line in again] == [["0", "1"], ["1", "2"], ["2", "3"]]
    assert {line[2] for line in again}.isdisjoint({line[2] for line in notes[victim]})


def read_notes(notes: Path) -> dict[str, list[list[str]]]:
    """Of each trajectory: turn, how often the session was asked, its process, and that of the worker."""
    return {path.name: [line.split() for line in path.read_text().splitlines()] for path in notes.iterdir()}


@pytest.mark.live
def test_a_trajectory_keeps_one_session_hands_it_on_reset_and_begins_again_with_another_when_its_worker_dies(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    victim = "train-1-0-2"
    config = configured(make_config, tmp_path / "notes", victim=victim, kill="worker")
    with local_cluster(config) as cluster, Client(cluster) as client:  # the shared ones have one tool worker
        directory = run(config, client=client).directory
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
    check_begins_again(directory, notes, victim)


def test_a_session_that_dies_is_replaced(make_config: Callable[..., RunConfig], client: Client, tmp_path: Path) -> None:
    config = configured(make_config, tmp_path / "notes", victim="train-1-0-2", kill="session")
    directory = run(config, client=client).directory
    notes = read_notes(tmp_path / "notes")
    check_begins_again(directory, notes, "train-1-0-2")
    last = read_metrics(directory)[-1]
    assert last["sessions_made"] == len({lines[0][2] for lines in notes.values()})
    assert last["sessions_made"] + last["sessions_reused"] == len(notes) and last["sessions_reused"] > 0
    assert last["sessions_reused"] <= last["sessions_resets"]


def test_functions_as_tools_get_a_session_of_libra_train(
    client: Client, random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.api.FunctionEnvironment", shells.Calling)  # whose every turn is a call
    kind = libra.session(shells.Shell, reset=shells.cleared, close=shells.Shell.close)
    given: dict[str, Any] = {
        "model": str(random_model), "client": client, "prompts": ["go"] * 4, "reward": shells.one, "tools": [shells.asked],
        "run__dir": str(tmp_path), "run__iterations": 2, "rollout__max_new_tokens": 4, "rollout__max_turns": 3,
        "rollout__ignore_eos": True, "trainer__prompts": 1, "trainer__group_size": 2, "evaluation__prompts": 0,
        "observe__progress": False, "observe__tensorboard": False,
    }  # fmt: skip
    summary = libra.train(**given, session=kind, run__name="demo")
    with TrajectoryStore.open(summary.directory / "trajectories.zarr") as store:
        turns, members = store.columns("turn"), store.num_trajectories
        assert members == 4 and set(turns["status"].tolist()) == {"ok", ""}
    last = read_metrics(summary.directory)[-1]
    assert last["sessions_made"] + last["sessions_reused"] == members
    with pytest.raises(ConfigError, match="session"):
        libra.train(**given, run__name="without")
    with pytest.raises(ConfigError, match="session"):
        libra.train(**given | {"tools": []}, session=kind, run__name="unused")
