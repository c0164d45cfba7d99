"""Runs of real workers whose trajectories are run by agents: what is trained is what the engine generated."""

import json
from pathlib import Path

import http_agents
import numpy as np
import pytest

import libra
from libra.driver.run_session import run
from libra.errors import BatchFailed
from libra.store.trajectory_store import TrajectoryStore

pytest.importorskip("httptools", reason="type pip install -e '.[agents]'")


def config_of(make_config, mark, agent, **more):
    environment, agent = {"name": "marked:Marked", "args": {"mark": str(mark)}}, {"function": f"http_agents:{agent}"}
    rollout = {"max_new_tokens": 4, "max_turns": 8, "max_context_tokens": 256, "slots": 8, "ignore_eos": False}
    return make_config(environment=environment, agent=agent, rollout=rollout, **more)


def trajectories_of(directory):
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        return [store.trajectory(index) for index in range(store.num_trajectories)]


def check_seen(trajectory, mark):
    """The tokens of each turn are those that the agent was given, and no others are trained."""
    turns = []
    for row in trajectory.turns:
        begin = row["sequence_start"] + row["prompt_tokens"]
        span = slice(begin, begin + row["generated_tokens"])
        assert trajectory.is_action[span].all() and (trajectory.behaviour_logprob[span] < 0).any()
        assert (trajectory.weight_version[span] >= 0).all()
        turns.append(trajectory.token_ids[span].tolist())
    assert turns == json.loads((mark / f"{trajectory.trajectory_id}.json").read_text())
    assert trajectory.num_action_tokens == sum(map(len, turns)), "shared tokens are trained once"
    return turns


@pytest.mark.core
def test_branches_are_sequences_and_exactly_the_generated_tokens_are_trained(make_config, client, tmp_path):
    summary = run(config_of(make_config, tmp_path, "branching", run={"iterations": 1}), client=client)
    assert [(row["trajectories"], row["agent_sequences"]) for row in summary.iterations] == [(4, 12)]
    assert np.isfinite([row["loss"] for row in summary.iterations]).all()
    trajectories = trajectories_of(summary.directory)
    assert len(trajectories) == 4
    for trajectory in trajectories:
        turns = check_seen(trajectory, tmp_path)
        assert len(turns) == 5 and len(turns[4]) <= 2
        assert len(trajectory.starts) == 2, "the path to the last turn, the second sample, the other conversation"
        row, ids = trajectory.turns[0], trajectory.token_ids
        first = row["sequence_start"]
        own = ids[first : first + row["prompt_tokens"] + row["generated_tokens"]]
        others = {0, *trajectory.starts} - {first}  # the branch has the same tokens before it, and no others
        assert any(np.array_equal(ids[start : start + len(own)], own) for start in others)


@pytest.mark.live
def test_a_lost_worker_is_replayed_from_the_journal(make_config, tmp_path):
    """On a cluster of its own: an agent kills its worker."""
    sections = {"run": {"iterations": 1}, "cluster": {"dashboard_port": 0, "threads": 1}}
    summary = run(config_of(make_config, tmp_path, "killer", **sections))
    assert (tmp_path / "killed").exists()
    for trajectory in trajectories_of(summary.directory):
        assert len(check_seen(trajectory, tmp_path)) == 2 and trajectory.retried == ""


def test_libra_train_takes_an_agent_that_rewards_itself(random_model, client, tmp_path):
    summary = libra.train(
        random_model, [f"question {i}" for i in range(10)], agent=http_agents.rewarding, client=client,
        run__iterations=1, run__dir=tmp_path, run__name="own", trainer__prompts=2, trainer__group_size=2, rollout__slots=8,
        rollout__max_new_tokens=4, rollout__max_context_tokens=256, cluster__threads=1, observe__progress=False,
        observe__trackers=[], evaluation__prompts=0,
    )  # fmt: skip
    assert [row["reward"] for row in summary.iterations] == [0.25]


def test_an_agent_that_fails_is_a_failure_of_its_trajectory(make_config, client, tmp_path):
    config = config_of(make_config, tmp_path, "failing", run={"iterations": 1}, trainer={"resample": 0})
    with pytest.raises(BatchFailed, match=r"http_agents\.py"):
        run(config, client=client)
    with TrajectoryStore.open(Path(config.run.dir) / config.run.name / "trajectories.zarr") as store:
        columns = store.columns()
    assert set(columns["failure"]) == {"tool"} and np.isnan(columns["reward"]).all()
    assert all("no agent at" in detail for detail in columns["failure_detail"])
