"""Workloads and figures of `benchmarks.divided`: what is reported, and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.divided import JOBS, Run, figures_of, lengths, simulate


def test_lengths_have_the_mean_and_the_maximum_that_are_reported_and_groups_are_alike() -> None:
    for job in JOBS.values():
        found = lengths(job, 3)
        assert found.shape == (job.requests,) and found.min() >= 1 and found.max() == job.max_tokens
        assert found.mean() == pytest.approx(job.mean_tokens, rel=1e-3)
        logs = np.log(found).reshape(-1, job.group_size)
        within, total = logs.var(axis=1, ddof=1).mean(), logs.var()
        assert 1.0 - within / total == pytest.approx(job.kinship, abs=0.12)
        assert not np.array_equal(found, lengths(job, 4))


def test_parts_of_generations_are_sooner_than_dealt_groups_and_the_true_lengths_help() -> None:
    job = JOBS["moonlight"]
    runs = {system: simulate(job, system, 0, 8192) for system in ("static", "arrival", "oracle")}
    assert runs["static"].seconds > runs["arrival"].seconds > runs["oracle"].seconds
    assert runs["static"].tail > runs["oracle"].tail
    assert runs["static"].result.preempted > 0 and runs["arrival"].result.preempted == 0
    generated = {run.result.generated_tokens for run in runs.values()}
    assert generated == {int(lengths(job, 0).sum())}


def test_a_share_of_the_gain_is_counted_from_the_static_system() -> None:
    result = simulate(JOBS["moonlight"]._replace(engines=1, requests=8), "oracle", 0, 8192).result
    seconds = {"static": 200.0, "arrival": 160.0, "seer": 150.0, "cmlfq": 150.0, "oracle": 100.0}
    found = figures_of({"moonlight": {system: [Run(value, 0.1, result)] for system, value in seconds.items()}})
    assert found["over_static_moonlight"].value == pytest.approx(200 / 150)
    assert found["share_of_oracle_gain"].value == pytest.approx(0.5)
    assert found["share_of_oracle_gain_by_order"].value == pytest.approx((1 - 150 / 160) / (1 - 100 / 160))
