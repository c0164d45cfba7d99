"""Runs of real workers whose trajectories are run by agents: what is trained is what the engine generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.config import RunConfig
from libra.driver.session import run
from libra.store.trajectories import TrajectoryStore

pytest.importorskip("starlette", reason="the extra `agents` is not installed")
pytest.importorskip("uvicorn", reason="the extra `agents` is not installed")


def config_of(make_config: Callable[..., RunConfig], mark: Path, agent: str, **more: Any) -> RunConfig:
    return make_config(
        environment={"name": "marked:Marked", "args": {"mark": str(mark)}},
        agent={"function": f"http_agents:{agent}"},
        rollout={"max_new_tokens": 4, "max_turns": 8, "max_context_tokens": 256, "slots": 8, "ignore_eos": False},
        **more,
    )


def stored(config: RunConfig) -> TrajectoryStore:
    assert config.run.name is not None
    return TrajectoryStore.open(config.run.dir / config.run.name / "trajectories.zarr")


def seen_by_agent(mark: Path, trajectory: Any) -> list[list[int]]:
    return json.loads((mark / f"{trajectory.trajectory_id}.json").read_text())  # type: ignore[no-any-return]


def generated(trajectory: Any) -> list[list[int]]:
    """The tokens of each turn, by what the store says of its place."""
    turns = []
    for row in trajectory.turns:
        begin = row["sequence_start"] + row["prompt_tokens"]
        span = slice(begin, begin + row["generated_tokens"])
        assert trajectory.is_action[span].all() and (trajectory.behaviour_logprob[span] < 0).any()
        assert (trajectory.weight_version[span] >= 0).all()
        turns.append(trajectory.token_ids[span].tolist())
    return turns


def test_branches_are_sequences_and_every_token_is_trained_once(
    make_config: Callable[..., RunConfig], client: Any, tmp_path: Path
) -> None:
    config = config_of(make_config, tmp_path, "branching")
    summary = run(config, client=client)
    store = stored(config)
    assert store.num_trajectories and summary is not None
    for index in range(store.num_trajectories):
        trajectory = store.trajectory(index)
        seen = seen_by_agent(tmp_path, trajectory)
        assert generated(trajectory) == seen and len(seen) == 5 and len(seen[4]) <= 2
        assert trajectory.num_action_tokens == sum(map(len, seen)), "shared tokens are trained once"
        assert len(trajectory.starts) == 2, (
            "the path to the last turn, the second sample of the second, and the other conversation"
        )
        first, last = trajectory.turns[0], trajectory.turns[4]
        shared = slice(
            first["sequence_start"], first["sequence_start"] + first["prompt_tokens"] + first["generated_tokens"]
        )
        own = trajectory.token_ids[shared]
        assert any(
            start != first["sequence_start"] and np.array_equal(trajectory.token_ids[start : start + len(own)], own)
            for start in (0, *trajectory.starts)
        ), "the branch has the same tokens before it, and no others"
        assert last["worker"].startswith("rollout")


def test_a_lost_worker_is_replayed_from_the_journal(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = config_of(make_config, tmp_path, "killer", cluster={"dashboard_port": 0, "threads": 1})
    run(config)
    store = stored(config)
    assert (tmp_path / "killed").exists()
    for index in range(store.num_trajectories):
        trajectory = store.trajectory(index)
        assert generated(trajectory) == seen_by_agent(tmp_path, trajectory)
        assert len(trajectory.turns) == 2 and trajectory.retried == ""


def test_an_agent_rewards_itself_and_is_refused_what_does_not_fit(
    make_config: Callable[..., RunConfig], client: Any, tmp_path: Path
) -> None:
    config = config_of(make_config, tmp_path, "rewarding")
    run(config, client=client)
    store = stored(config)
    assert set(store.columns()["reward"]) == {0.25} and set(store.columns()["failure"]) == {"none"}


def test_an_agent_that_fails_is_a_failure_of_its_trajectory(
    make_config: Callable[..., RunConfig], client: Any, tmp_path: Path
) -> None:
    config = config_of(make_config, tmp_path, "failing", trainer={"resample": 0})
    run(config, client=client)
    columns = stored(config).columns()
    assert set(columns["failure"]) == {"tool"} and np.isnan(columns["reward"]).all()
    assert all("no agent at http://127.0.0.1" in detail for detail in columns["failure_detail"])
