"""Agents in runs with real workers and a real engine: the workflow, `libra.train`, commands, lost engines, many at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import http_agents
import numpy as np
import pytest
from killed_engine import kill_at_generation

import libra
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig
from libra.driver.session import Session, run
from libra.store.event_log import read_events
from libra.store.trajectories import TrajectoryStore

for extra in ("starlette", "uvicorn"):
    pytest.importorskip(extra, reason="the extra `agents` is not installed")

SUPPORT = Path(__file__).parents[1] / "support"
Config = Callable[..., RunConfig]


def config_of(make_config: Config, mark: Path, agent: dict[str, Any], **sections: Any) -> RunConfig:
    rollout = {"max_new_tokens": 4, "max_turns": 8, "max_context_tokens": 256, "slots": 8, "ignore_eos": False}
    return make_config(
        environment={"name": "marked:Marked", "args": {"mark": str(mark)}},
        agent=agent, rollout=rollout, **sections,
    )  # fmt: skip


def generated(trajectory: Any) -> list[list[int]]:
    turns = []
    for row in trajectory.turns:
        begin = row["sequence_start"] + row["prompt_tokens"]
        turns.append(trajectory.token_ids[begin : begin + row["generated_tokens"]].tolist())
    return turns


def check_seen(directory: Path, mark: Path, count: int) -> None:
    """Every trajectory has the tokens that its agent was given, and no failure."""
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        assert store.num_trajectories == count
        for index in range(count):
            trajectory = store.trajectory(index)
            assert trajectory.failure == "none" and trajectory.retried == "", trajectory.failure_detail
            assert generated(trajectory) == json.loads((mark / f"{trajectory.trajectory_id}.json").read_text())
            assert trajectory.num_action_tokens == sum(map(len, generated(trajectory)))


@pytest.mark.timeout(600)
def test_the_workflow_trains_its_agent(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    settings = [
        "run.iterations=1", f"run.dir={tmp_path}", "run.name=flow", "trainer.prompts=2", "trainer.group_size=4",
        "evaluation.prompts=16", "rollout.slots=16", "cluster.tool_slots=16", "cluster.dashboard_port=0",
        "observe.progress=false", "observe.tensorboard=false",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(repository / "workflows" / "openai_agent.py"), *settings],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    from libra.envs.tool_arithmetic import ToolArithmetic
    from libra.rollout.chat_format import load_chat_format

    environment = ToolArithmetic()
    chat = load_chat_format(Path(libra.__file__).parent / "assets" / "tiny_arithmetic", environment.tool_schemas)
    with TrajectoryStore.open(tmp_path / "flow" / "trajectories.zarr") as store:
        columns, turns = store.columns(), store.columns("turn")
        trajectories = [store.trajectory(i) for i in range(store.num_trajectories)]
    assert Counter(columns["split"]) == {"train": 8, "eval": 32} and set(columns["failure"]) <= {"none", "policy"}
    assert set(turns["sequence_start"]) == {0} and "calculator" in set(turns["tool"])
    assert columns["reward"][columns["split"] == "eval"].mean() > 0.1, "the model that ships can do some of it"
    for trajectory in trajectories:
        prompt = environment.prompt(trajectory.trajectory_id.split, trajectory.trajectory_id.group)
        if prompt.prompt_id == trajectory.prompt.prompt_id:
            expected = chat.prompt_ids(list(prompt.messages))
            assert trajectory.token_ids[: len(expected)].tolist() == expected.tolist(), "as the built-in loop asks"


def test_libra_train_takes_an_agent_that_rewards_itself(random_model: Path, client: Any, tmp_path: Path) -> None:
    summary = libra.train(
        random_model, [f"question {i}" for i in range(10)], agent=http_agents.rewarding, client=client,
        run__iterations=1, run__dir=tmp_path, run__name="own", trainer__prompts=2, trainer__group_size=2, rollout__slots=8,
        rollout__max_new_tokens=4, rollout__max_context_tokens=256, cluster__threads=1, observe__progress=False,
        observe__tensorboard=False, evaluation__prompts=0,
    )  # fmt: skip
    assert [row["reward"] for row in summary.iterations] == [0.25]


def test_commands_in_an_environment_of_their_own_one_at_a_time(
    make_config: Config, client: Any, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    agent = {"command": f"python {SUPPORT / 'stdlib_agent.py'}", "venv": str(tmp_path / "bare"), "concurrency": 1}
    summary = run(config_of(make_config, tmp_path, agent, run={"iterations": 1}), client=client)
    with TrajectoryStore.open(summary.directory / "trajectories.zarr") as store:
        columns = store.columns()
    assert set(columns["failure"]) == {"none"} and set(columns["reward"]) == {0.5}
    names = [event["name"] for event in read_events(summary.directory / "events.jsonl").events]
    assert "quantum_given_back" in names, "four trajectories, and place for one agent"


@pytest.mark.timeout(600)
def test_agents_wait_while_their_engine_is_killed(make_config: Config, tmp_path: Path) -> None:
    cluster = {"dashboard_port": 0, "threads": 1, "rollout_workers": 2}
    config = config_of(
        make_config, tmp_path, {"function": "http_agents:asking"}, run={"iterations": 1}, cluster=cluster
    )
    with Session(config) as session:
        found = present_workers(session.client)
        engines = [address for address, worker in found.items() if worker["name"].startswith("rollout")]
        session.client.run(kill_at_generation, "demo", 1, tmp_path / "killed", workers=engines)
        list(session.iterations())
    assert (tmp_path / "killed").exists()
    check_seen(session.directory, tmp_path, 4)


@pytest.mark.timeout(600)
def test_256_agents_work_at_once(make_config: Config, tmp_path: Path) -> None:
    many = http_agents.MEETING
    config = config_of(
        make_config, tmp_path, {"function": "http_agents:meeting"}, run={"iterations": 1},
        cluster={"dashboard_port": 0, "threads": 1, "tool_slots": many}, trainer={"prompts": many // 8, "group_size": 8},
    )  # fmt: skip
    with Session(config) as session:
        list(session.iterations())
    assert len(list(tmp_path.glob("here-*"))) == many
    check_seen(session.directory, tmp_path, many)


def test_the_metrics_count_an_agents_sequences(make_config: Config, client: Any, tmp_path: Path) -> None:
    config = config_of(make_config, tmp_path, {"function": "http_agents:branching"})
    summary = run(config, client=client)
    assert [(row["trajectories"], row["agent_sequences"]) for row in summary.iterations] == [(4, 12), (4, 12)]
    assert np.isfinite([row["loss"] for row in summary.iterations]).all()
