"""``workflows/custom_reward.py``: a user's node in the graph really changes the reward, on the model that ships."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from distributed import Client

from libra.config import RunConfig
from libra.driver.session import run
from libra.testing import FixedTurns
from libra.types import EndReason, Episode, Prompt, ToolReturn, ToolStatus, Turn


def test_the_judge_docks_each_call_that_did_not_come_back_ok(repository: Path) -> None:
    judge = runpy.run_path(str(repository / "workflows" / "custom_reward.py"))["judge"]
    returns = tuple(ToolReturn("t", status, "") for status in (ToolStatus.OK, ToolStatus.TIMEOUT, ToolStatus.ERROR))
    episode = Episode("x", Prompt("p", ()), (Turn("", (), returns), Turn("")), EndReason.ANSWERED)
    assert judge([episode]) == [pytest.approx(-0.2)]


@pytest.mark.live
def test_the_script_runs_as_a_user_would_run_it(repository: Path, tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}", "run.name=judged", "run.iterations=1", "trainer.prompts=4", "cluster.threads=1"]
    command = [sys.executable, "workflows/custom_reward.py", *settings]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 iterations; reward of the last:" in done.stdout
    group = zarr.open_group(tmp_path / "judged" / "trajectories.zarr", mode="r")
    bad = np.zeros(32)
    np.add.at(bad, group["turn/trajectory"][:], [str(status) not in ("ok", "") for status in group["turn/status"][:]])
    docked = group["trajectory/reward"][:] + 0.1 * bad
    assert np.allclose(docked, np.round(docked)), "reward 0 or 1 of the environment, less the judge's share"
    assert bad.sum() > 0, "no call failed: the judge had nothing to do"


def test_extra_rewards_reach_the_store(make_config: Callable[..., RunConfig], client: Client) -> None:
    class Constant(FixedTurns):
        def grade(self, episode: Episode) -> float:
            return 1.0

    def by_position(episodes: list[Episode]) -> list[float]:
        return [10.0 * index for index in range(len(episodes))]

    score = lambda episodes: dask.delayed(by_position)(episodes)  # noqa: E731
    summary = run(make_config(run={"iterations": 1}), environment=Constant(), client=client, score=score)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert np.array_equal(columns["reward"][:], 1.0 + 10.0 * columns["sample"][:])
