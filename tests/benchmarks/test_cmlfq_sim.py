"""What `benchmarks.cmlfq_sim` counts, on cells that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import cmlfq_sim
from benchmarks.cmlfq_sim import (
    FULL,
    POLICIES,
    Cell,
    Job,
    Runs,
    best,
    figures_of,
    homogeneous_layouts,
    interval,
    mixed_layouts,
    simulate,
)
from libra.errors import ConfigError
from libra.policy import ORDERINGS


def cell(oracle: float, cmlfq: float) -> Cell:
    """Three seeds; every other policy is as fast as FIFO."""
    took = {"oracle": oracle, "cmlfq": cmlfq}
    rows = {
        (policy, kind): [100.0 * took.get(policy, 1.0)] * 3
        for policy in POLICIES
        for kind in ("homogeneous", "planned")
    }
    rows["fifo", "homogeneous"] = [100.0] * 3
    return Cell("cell", {2: 8}, {2: 8}, rows, rows)


def test_every_ordering_is_compared() -> None:
    assert set(POLICIES) == set(ORDERINGS) | {"cmlfq_again"}


def test_the_share_counts_only_cells_where_the_oracle_gains() -> None:
    figures = figures_of([cell(0.80, 0.90), cell(0.97, 1.02)])
    assert figures["share_of_oracle_gain"].value == pytest.approx(0.5)
    assert figures["worst_vs_homogeneous_fifo"].value == pytest.approx(1.02)
    assert figures["makespan_over_fifo_cmlfq"].value == pytest.approx((0.90 * 1.02) ** 0.5)
    assert figures["makespan_over_fifo_fifo"].value == 1.0
    assert "share_of_oracle_gain" not in figures_of([cell(0.97, 1.0)])


def test_layouts_use_all_gpus() -> None:
    for gpus in (16, 48, 96):
        for layout in [*homogeneous_layouts(gpus), *mixed_layouts(gpus)]:
            assert sum(tp * count for tp, count in layout.items()) == gpus
        assert len(mixed_layouts(gpus)) == 3


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = np.random.default_rng(0).normal(1.0, 0.1, 10)
    low, high = interval(values)
    assert low < values.mean() < high and (low, high) == interval(values)


JOB = Job("tau_airline_gpt4o.csv", 0.55, 16, 4, "fifo", ((2, 8),), 0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that were simulated; each takes as many seconds as its smallest engines have GPUs, and its seed more."""
    jobs: list[Job] = []

    def simulate(job: Job) -> tuple[float, float]:
        jobs.append(job)
        return float(job.layout[0][0] + job.seed), 1.0

    monkeypatch.setattr(cmlfq_sim, "simulate", simulate)
    return jobs


def test_a_later_call_goes_on_where_the_first_one_ended(
    ran: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs.jsonl"
    assert Runs(out, 1).of([JOB]) == [(2.0, 1.0)]
    assert Runs(out, 1).of([JOB, JOB._replace(seed=3), JOB]) == [(2.0, 1.0), (5.0, 1.0), (2.0, 1.0)]
    assert ran == [JOB, JOB._replace(seed=3)]
    monkeypatch.setattr(cmlfq_sim, "fingerprint", lambda policy: "other code")
    Runs(out, 1).of([JOB])
    assert ran[2:] == [JOB]


def test_a_layout_that_is_far_behind_is_not_tried_on_every_planning_seed(ran: list[Job]) -> None:
    assert best(Runs(None, 1), JOB, [{2: 8}, {1: 16}, {500: 1}]) == {1: 16}
    assert [dict(job.layout) for job in ran] == [{2: 8}, {1: 16}, {500: 1}, {2: 8}, {1: 16}]


def test_the_first_layout_is_kept_unless_another_is_faster_by_enough(ran: list[Job]) -> None:
    assert best(Runs(None, 1), JOB, [{100: 1}, {99: 1}], 0.02) == {100: 1}
    assert best(Runs(None, 1), JOB, [{100: 1}, {99: 1}]) == {99: 1}
    assert best(Runs(None, 1), JOB, [{100: 1}, {50: 1}], 0.02) == {50: 1}


def test_one_simulation_is_the_same_in_every_process(tmp_path: Path) -> None:
    data = Path(cmlfq_sim.__file__).parent / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
    jobs = [JOB._replace(traces=str(data), policy=policy, load=1) for policy in ("fifo", "cmlfq")]
    assert Runs(None, 2).of(jobs) == Runs(None, 1).of(jobs)


def test_the_grid_has_three_sizes_at_three_loads() -> None:
    assert sorted(FULL) == [(gpus, load) for gpus in (16, 48, 96) for load in (4, 12, 32)]
    assert cmlfq_sim.chosen(["96x4", "16x32"]) == [(96, 4), (16, 32)]
    with pytest.raises(ConfigError, match="16x5"):
        cmlfq_sim.chosen(["16x4", "16x5"])


def test_what_is_taken_for_alike_is_alike() -> None:
    data = Path(cmlfq_sim.__file__).parent / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
    job = JOB._replace(traces=str(data), policy="paper", load=2)
    assert cmlfq_sim.alike(job).policy == "fifo" and simulate(job) == simulate(cmlfq_sim.alike(job))
    mixed = job._replace(layout=((2, 4), (8, 1)))
    assert cmlfq_sim.alike(mixed) == mixed
    again = job._replace(policy="cmlfq_again")
    assert cmlfq_sim.alike(again).policy == "cmlfq"  # tau's four samples of a task are one group


def test_a_second_pass_is_scored_on_the_same_trajectories_and_knows_the_first() -> None:
    data = Path(cmlfq_sim.__file__).parent / "data" / "agent_turns" / "mini_swe_gemini3.csv"
    job = JOB._replace(traces=str(data), policy="cmlfq_again", gpus=4, load=40, layout=((1, 4),))
    again, cold = cmlfq_sim.alike(job), job._replace(policy="cmlfq")
    assert again == job
    scored, before = (cmlfq_sim.workload_of(str(data), 0.55, 64, 0, earlier) for earlier in (None, 1.0))
    assert {plan.prompt for plan in scored.trajectories} == {plan.prompt for plan in before.trajectories}
    assert not set(scored.totals()) & set(before.totals())
    assert simulate(job) != simulate(cold)
    assert job.name != cold.name != job._replace(survives=1.0).name
