"""Runs whose trajectories lease a live process each, on two workers with TOOL slots: pinned, reset, reused, and lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from libra.cluster.local import local_cluster
from libra.config import RunConfig
from libra.driver.session import run
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
    _, notes, rows = shells()
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
