"""The loop whose rewards come late: guesses count until a batch takes the rewards, and then both add up to the true advantages."""

from __future__ import annotations

import asyncio
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.late_loop import LateLoop
from benchmarks.report import QUICKSTART
from libra.config import load_config

SMALL = (
    "trainer.prompts=2", "trainer.group_size=6", "rollout.max_turns=2", "trainer.lr=0", "run.iterations=2", "run.seed=0",
    "trainer.late=correct", "trainer.late_tau=4", "trainer.normalize_std=false",
)  # fmt: skip


def test_a_guess_and_its_correction_add_up_to_the_advantage_of_the_reward(tmp_path: Path) -> None:
    loop = LateLoop(load_config(QUICKSTART, SMALL), tmp_path, delay=1)
    true: dict[Any, float] = {}
    taken: list[list[Any]] = []
    take_reward, step = loop._take_reward, loop.replica.step

    def watched_reward(made: Any, episode: Any) -> None:
        true[made.trajectory_id] = float(loop.environment.grade(episode))
        take_reward(made, episode)

    def watched_step(trained: Any, number: int) -> Any:
        taken.append([(each.trajectory_id, each.advantage, each.counted) for each in trained])
        return step(trained, number)

    loop._take_reward, loop.replica.step = watched_reward, watched_step  # type: ignore[method-assign]
    asyncio.run(loop.run())
    own = {tid: advantage for tid, advantage, counts in taken[0] if counts}
    late = {tid: advantage for tid, advantage, counts in taken[1] if not counts}
    assert len(taken) == 2 and late and loop.counted == 12  # those of batch 0; batch 1 is the last one
    for group in range(2):
        ids = sorted((tid for tid in true if tid.iteration == 0 and tid.group == group), key=lambda tid: tid.sample)
        rewards = np.array([true[tid] for tid in ids])
        for tid, goal in zip(ids, rewards - rewards.mean(), strict=True):
            assert own.get(tid, 0.0) + late.get(tid, 0.0) / exp(-1 / 4) == pytest.approx(goal, abs=1e-6)
