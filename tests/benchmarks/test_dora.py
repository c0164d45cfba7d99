"""The table of DORA: lengths as the paper names them, the order of rows, and one simulation of each system at a small size."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.dora import FITTED, LONGEST, MEAN, PREDICTED, Job, Simulations, cell_of, order, traces
from libra.sim.disciplines import DISCIPLINES
from libra.sim.tuning import Setting, play


def test_lengths_have_the_mean_and_the_limit_of_the_paper() -> None:
    lengths = np.array([trace.turns[0].new_tokens for trace in traces()])
    assert abs(lengths.mean() / MEAN - 1) < 0.05 and LONGEST / 2 < lengths.max() <= LONGEST


def test_the_reported_order_is_right_and_a_turned_pair_is_not() -> None:
    rows = {row: row.minutes for row in (FITTED, *PREDICTED)}
    assert order(rows) == 1.0
    dora, partial = PREDICTED[2], PREDICTED[1]
    assert math.isclose(order(rows | {dora: partial.minutes, partial: dora.minutes}), 7 / 8)


def test_training_that_costs_more_makes_a_synchronous_step_longer_by_as_much() -> None:
    def seconds(factor: float) -> float:
        cell = cell_of(FITTED._replace(gpus=32), factor, 4)  # 8 GPUs
        cell = replace(cell, groups=8, group_size=4)
        return play(cell, DISCIPLINES["colocated"], Setting(0, 4, 4.0), 1, causes=False).step_s(1)

    one, two, three = (seconds(factor) for factor in (1.0, 2.0, 3.0))
    assert two > one and three - two == pytest.approx(two - one, rel=1e-6)


def test_a_job_is_simulated_once_and_what_is_finished_is_read(tmp_path: Path) -> None:
    played: list[Job] = []

    def play_each(_: Any, jobs: list[Job]) -> list[float]:
        played.extend(jobs)
        return [job.factor * 0.1 for job in jobs]

    pool: Any = SimpleNamespace(map=play_each)
    one, two = Job(FITTED, 1 / 3, 0, 1), Job(PREDICTED[0], 2.0, 8, 1)
    assert Simulations(pool, None).minutes([one, two, one]) == [one.factor * 0.1, 0.2, one.factor * 0.1]
    assert played == [one, two]
    Simulations(pool, tmp_path / "found").minutes([one])
    again = Simulations(pool, tmp_path / "found")
    assert again.minutes([two, one]) == [0.2, one.factor * 0.1] and played == [one, two, one, two]
