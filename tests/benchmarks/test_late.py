"""The benchmark of late rewards: the figures of RAC's authors with their seeds, and the law behind them."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import pytest

from benchmarks import late, late_loop
from benchmarks.late import DELAYS, PUBLISHED, TAU, Table, bias_figures, gap_se, law_error, learning_figures, sampled


def test_the_published_reductions_and_the_law() -> None:
    figures = bias_figures()
    for delay, published in zip(DELAYS, PUBLISHED, strict=True):
        assert figures[f"bias_reduction_{delay}"].value == pytest.approx(published, abs=0.005)
    assert figures["mean_bias_reduction"].value == pytest.approx(47.88, abs=0.005)
    assert figures["exact_law_error"].value < 1e-12


def test_the_law_fails_for_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "correction", lambda before, after, delay, tau: 0.9 * (after - before))
    assert law_error(Table.of_the_paper(), 5, moved=0.5) > 1e-3


def test_more_trajectories_approach_the_expectation_of_the_same_estimate() -> None:
    table = Table.of_the_paper()
    _, late_NSA = sampled(table, 50, seed=9, trajectories=400)
    aged_SA = table.fast_SA + np.exp(-50 / TAU) * table.slow_SA
    error_SA = late_NSA.mean(0) - table.of_steps_SA(aged_SA, late.STEPS)
    assert (np.abs(error_SA) < 5 * late_NSA.std(0) / np.sqrt(len(late_NSA))).all()


def test_a_gap_is_in_standard_errors_of_the_difference() -> None:
    assert gap_se([0.9, 1.1], [0.7, 0.9]) == pytest.approx(0.2 / np.sqrt(0.02 / 2 + 0.02 / 2))
    assert gap_se([0.5, 0.7], [0.6, 0.8]) < 0
    assert gap_se([0.5, 0.5], [0.5, 0.5]) == 0


def test_a_finished_run_is_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[int, int]] = []

    def learned(directory: Path, delay: int, late: str, seed: int, overrides: list[str]) -> float:
        began.append((delay, seed))
        return 0.9 + 0.01 * seed - 0.1 * delay * len(overrides)

    monkeypatch.setattr(late, "learned", learned)

    def figures(seeds: int, delays: list[int], *overrides: str) -> dict[str, float]:
        found = learning_figures(seeds, delays, overrides, drop=False, out=tmp_path / "runs")
        return {name: figure.value for name, figure in found.items()}

    assert figures(2, [1])["late_1_reward"] == pytest.approx(0.905) and len(began) == 4
    assert figures(2, [1, 5])["late_gap_se"] == 0 and began[4:] == [(5, 0), (5, 1)]
    assert figures(2, [5], "run.iterations=3")["late_gap_se"] > 1 and len(began) == 10  # of other settings


def test_emulated_runs_are_kept_apart_from_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "learned", lambda directory, delay, *_: 0.5)
    monkeypatch.setattr(late, "_emulated", lambda runs, processes: [0.25 * processes for _ in runs])

    def reward(emulated: int) -> float:
        return learning_figures(2, [1], (), drop=False, out=tmp_path / "runs", emulated=emulated)["late_1_reward"].value

    assert [reward(0), reward(3), reward(0), reward(1)] == [0.5, 0.75, 0.5, 0.75]


def test_emulated_runs_are_no_forks_of_a_process_that_has_used_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[int, str]] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, processes: int, context: BaseContext | None = None) -> None:
            super().__init__(processes)
            began.append((processes, (context or multiprocessing.get_context()).get_start_method()))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # is set, and taken back
    monkeypatch.setattr(late, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(late_loop, "learned", lambda delay, kind, seed, overrides: delay + seed / 10)
    assert list(late._emulated([("emulated", 3, "correct", 1), ("emulated", 0, "off", 2)], 2)) == [3.1, 0.2]
    assert began == [(2, "spawn")]
