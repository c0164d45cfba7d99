"""A run learns, and what goes wrong in a trajectory is told apart from what its policy did.

README ("a language model learns to use a calculator"), docs/failures.md (a failed reward is a failure and never 0; each way in
which a tool can fail is a status that the model reads), docs/tools.md (tools of MCP servers).
"""

import sys

import numpy as np
import pytest
import whole_run

from libra.config import config_from_dict
from libra.driver.run_session import run
from libra.envs import FunctionEnvironment
from libra.types import ToolStatus

pytestmark = pytest.mark.core


def test_a_run_learns(make_config, client):
    def reward(completion):
        return sum(char in "abcdefghijklmnopqrstuvwxyz" for char in completion) / 8

    environment = FunctionEnvironment(prompts=[{"prompt": str(i)} for i in range(8)], reward=reward, seed=0)
    config = make_config(
        run={"iterations": 25}, rollout={"max_new_tokens": 8}, trainer={"prompts": 2, "group_size": 8, "lr": 2e-2},
        checkpoint={"every": 0},
    )  # fmt: skip
    rewards = [values["reward"] for values in run(config, environment=environment, client=client).iterations]
    assert np.mean(rewards[:5]) < 0.25 and np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5]), rewards


def test_a_nan_reward_is_a_failure_of_the_reward_and_never_0(finished):
    stored = whole_run.columns(finished.directory)
    train = stored["batch"] >= 0
    bad = train & (stored["sample"] == 1)
    assert bad.sum() == 2 * 6
    assert set(stored["failure"][bad]) == {"reward"} and np.isnan(stored["reward"][bad]).all()
    assert (stored["advantage"][bad] == 0).all() and np.isfinite(stored["reward"][train & ~bad]).all()
    assert set(stored["retried"][bad]) == {"reward"} and set(stored["attempt"][~bad]) == {0}  # asked again, in vain
    for batch in range(6):  # the others of a group are compared with each other only
        for iteration, group in {(k, g) for k, g, b in zip(*_ids(stored), strict=True) if b == batch}:
            rows = train & (stored["iteration"] == iteration) & (stored["group"] == group)
            assert abs(stored["advantage"][rows].sum()) < 1e-5
    for values in finished.iterations:
        assert values["left_out"] == values["failures/reward"] == values["resampled/reward"] == 2


def _ids(stored):
    return [stored[name].tolist() for name in ("iteration", "group", "batch")]


def test_whatever_a_tool_does_is_a_status_that_the_model_reads(finished):
    stored, turns = (whole_run.columns(finished.directory, level) for level in ("trajectory", "turn"))
    called = turns["status"] != ""
    assert set(turns["status"][called]) == set(map(str, ToolStatus))
    assert (turns["observation_tokens"][called] > 0).all() and turns["observation_tokens"].max() < 300
    sound = stored["sample"] != 1
    assert set(stored["failure"][sound]) == {"policy"}  # ended by max_turns, and trained on all the same
    assert set(stored["num_turns"]) == {3}


def test_a_model_calls_a_tool_of_an_mcp_server(client, repository, tmp_path):
    pytest.importorskip("mcp", reason="pip install -e '.[mcp]'")
    server = f"{sys.executable} {repository / 'workflows' / 'mcp_tools.py'} serve"
    config = config_from_dict({
        "run": {"name": "served", "dir": str(tmp_path), "iterations": 1}, "model": {"path": "libra/tiny-arithmetic"},
        "environment": {"args": {"calculator": False, "max_operations": 2}, "tools": {"mcp": server}},
        "rollout": {"slots": 8, "max_context_tokens": 512, "max_turns": 6, "max_new_tokens": 24},
        "trainer": {"prompts": 2, "group_size": 4, "max_row_tokens": 512}, "evaluation": {"prompts": 0},
        "checkpoint": {"every": 0}, "observe": {"progress": False, "trackers": []},
    })  # fmt: skip
    summary = run(config, client=client)
    assert summary.iterations[0]["reward"] > 0
    turns = whole_run.columns(summary.directory, "turn")
    assert "ok" in set(turns["status"][turns["tool"] == "calculator"])
