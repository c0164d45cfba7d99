"""The loop whose rewards come late: guesses count, for what they are worth, until a batch takes the rewards; both add up to the
true advantages."""

from __future__ import annotations

import asyncio
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.late_loop import LateLoop
from benchmarks.late_runs import guess
from benchmarks.report import QUICKSTART
from libra.config import load_config

SMALL = (
    "trainer.prompts=2", "trainer.group_size=6", "rollout.max_turns=2", "trainer.lr=0", "run.iterations=3", "run.seed=0",
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
    own = {tid: advantage for batch in taken for tid, advantage, counts in batch if counts}
    late = {tid: advantage for batch in taken for tid, advantage, counts in batch if not counts}
    assert len(taken) == 3 and late and loop.counted == 24  # those of batches 0 and 1; batch 2 is the last one
    guessed, final = [], []
    for iteration, group in product(range(2), range(2)):
        ids = sorted((t for t in true if (t.iteration, t.group) == (iteration, group)), key=lambda tid: tid.sample)
        rewards = np.array([true[tid] for tid in ids])
        for tid, goal in zip(ids, rewards - rewards.mean(), strict=True):
            assert own.get(tid, 0.0) + late.get(tid, 0.0) / exp(-1 / 4) == pytest.approx(goal, abs=1e-6)
        if iteration == 0:  # guesses of the first batch count in full
            guesses = np.array([guess(true[tid], 0, str(tid)) for tid in ids])
            guessed, final = [*guessed, *(guesses - guesses.mean())], [*final, *(rewards - rewards.mean())]
            assert [own.get(tid, 0.0) for tid in ids] == pytest.approx(guesses - guesses.mean(), abs=1e-6)
    right = np.dot(guessed, guessed) / np.count_nonzero(guessed)  # one more trajectory, guessed right
    slope = (np.dot(guessed, final) + right) / (np.dot(guessed, guessed) + right)
    assert 0 < slope < 1
    for group in range(2):
        ids = sorted((t for t in true if (t.iteration, t.group) == (1, group)), key=lambda tid: tid.sample)
        guesses = np.array([guess(true[tid], 0, str(tid)) for tid in ids])
        shown = [own.get(tid, 0.0) for tid in ids]
        assert shown == pytest.approx(slope * (guesses - guesses.mean()), abs=1e-6)
