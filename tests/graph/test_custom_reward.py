import runpy

import dask
import numpy as np
import pytest
import zarr

from libra.driver.run_session import run
from libra.testing import FixedTurns
from libra.types import EndReason, Episode, Prompt, ToolReturn, ToolStatus, Turn


def test_the_judge_docks_each_call_that_did_not_come_back_ok(repository):
    judge = runpy.run_path(str(repository / "workflows" / "custom_reward.py"))["judge"]
    returns = tuple(ToolReturn("t", status, "") for status in (ToolStatus.OK, ToolStatus.TIMEOUT, ToolStatus.ERROR))
    episode = Episode("x", Prompt("p", ()), (Turn("", (), returns), Turn("")), EndReason.ANSWERED)
    assert judge([episode]) == [pytest.approx(-0.2)]


def test_extra_rewards_reach_the_store(make_config, client):
    class Constant(FixedTurns):
        def grade(self, episode):
            return 1.0

    def by_position(episodes):
        return [10.0 * index for index in range(len(episodes))]

    score = lambda episodes: dask.delayed(by_position)(episodes)  # noqa: E731
    summary = run(make_config(run={"iterations": 1}), environment=Constant(), client=client, score=score)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert np.array_equal(columns["reward"][:], 1.0 + 10.0 * columns["sample"][:])
