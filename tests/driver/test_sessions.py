"""Runs whose trajectories lease a live process each, on two workers with TOOL slots: pinned, reset, reused, and lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import shells as shell_tools
from distributed import Client

import libra
from libra.cluster.local import local_cluster
from libra.config import RunConfig
from libra.driver.session import run
from libra.errors import ConfigError
from libra.observe.metrics import read_metrics
from libra.store.trajectories import TrajectoryStore

ITERATIONS, MEMBERS = 3, 8


@pytest.fixture
def shells(make_config: Callable[..., RunConfig], tmp_path: Path):
    """Runs trajectories of four turns, three of them with an action; returns summary, notes by trajectory, and stored rows."""

    def go(**args: str):
        notes = tmp_path / "notes"
        notes.mkdir()
        config = make_config(
            run={"iterations": ITERATIONS},
            environment={"name": "shells:Shells", "args": {"notes": str(notes), **args}},
            rollout={"max_turns": 4},
            trainer={"prompts": 2, "group_size": 4},
            cluster={"tool_workers": 2},
        )
        with local_cluster(config) as cluster, Client(cluster) as client:
            summary = run(config, client=client)
        found = {path.name: [line.split() for line in path.read_text().splitlines()] for path in notes.iterdir()}
        with TrajectoryStore.open(summary.directory / "trajectories.zarr") as store:
            rows = {name: np.array(values) for name, values in store.columns().items()}
        return summary, found, rows

    return go


def test_a_trajectory_keeps_one_session_and_hands_it_on_reset(shells) -> None:
    summary, notes, rows = shells()
    assert len(notes) == ITERATIONS * MEMBERS
    for lines in notes.values():
        assert [line[:2] for line in lines] == [
            ["0", "1"],
            ["1", "2"],
            ["2", "3"],
        ]  # turn, and how often the session was asked
        assert len({line[2] for line in lines}) == 1 == len({line[3] for line in lines})
    of_session = Counter(lines[0][2] for lines in notes.values())
    assert len(of_session) < len(notes) and len({lines[0][3] for lines in notes.values()}) == 2
    by_iteration = [{lines[0][2] for name, lines in notes.items() if name.startswith(f"train-{k}-")} for k in (0, 2)]
    assert by_iteration[0] & by_iteration[1], "sessions outlive iterations"
    assert set(rows["failure"]) == {"policy"}  # four turns, and still calling: the model's own
    last = read_metrics(summary.directory)[-1]
    assert last["sessions_made"] == len(of_session) and last["sessions_made"] + last["sessions_reused"] == len(notes)
    assert (
        last["sessions_reused"] <= last["sessions_resets"]
        and last["sessions_replaced"] == last["sessions_expired"] == 0
    )


@pytest.mark.parametrize("kill", ["worker", "session"])
def test_a_lost_session_is_an_infrastructure_failure_and_its_trajectory_begins_again(shells, kill: str) -> None:
    victim = "train-1-0-2"
    _, notes, rows = shells(victim=victim, kill=kill)
    place = (rows["iteration"] == 1) & (rows["group"] == 0) & (rows["sample"] == 2)
    assert rows["retried"][place].tolist() == ["worker"] and rows["failure"][place].tolist() == ["policy"]
    assert np.isfinite(rows["reward"]).all() and len(rows["reward"]) == ITERATIONS * MEMBERS
    again = notes[f"{victim}.1"]
    assert [line[:2] for line in again] == [["0", "1"], ["1", "2"], ["2", "3"]]
    assert {line[2] for line in again}.isdisjoint({line[2] for line in notes[victim]})


def test_functions_as_tools_get_a_session_of_libra_train(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.api.FunctionEnvironment", shell_tools.Calling)  # whose every turn is a call
    given = {"model": str(random_model), "prompts": ["go"] * 4, "reward": shell_tools.one, "tools": [shell_tools.asked]}
    kind = libra.session(shell_tools.Shell, reset=shell_tools.cleared, close=shell_tools.Shell.close)
    settings = {
        "run__name": "demo", "run__dir": str(tmp_path), "run__iterations": 2, "rollout__max_new_tokens": 4, "rollout__max_turns": 3,
        "rollout__ignore_eos": True,
        "trainer__prompts": 1, "trainer__group_size": 2, "cluster__threads": 1, "cluster__dashboard_port": 0,
        "evaluation__prompts": 0, "observe__progress": False, "observe__tensorboard": False,
    }  # fmt: skip
    summary = libra.train(**given, session=kind, **settings)
    with TrajectoryStore.open(summary.directory / "trajectories.zarr") as store:
        turns, members = store.columns("turn"), store.num_trajectories
        assert members == 4 and set(turns["status"].tolist()) <= {"ok", ""} and "ok" in turns["status"].tolist()
    last = read_metrics(summary.directory)[-1]
    assert last["sessions_made"] + last["sessions_reused"] == members
    with pytest.raises(ConfigError, match=r"libra\.train session=libra\.session"):
        libra.train(**given, **settings | {"run__name": "without"})
    with pytest.raises(ConfigError, match="session: no tool takes it"):
        libra.train(**given | {"tools": []}, session=kind, **settings | {"run__name": "unused"})
