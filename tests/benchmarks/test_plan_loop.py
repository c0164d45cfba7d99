"""Replanning by the whole cost model: it learns its error, and shares GPUs between phases where that pays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import plan_loop
from benchmarks.plan_loop import Learned, PlanLoop, SharedLayout, Sharing, proposal, shared_plan, split_plan
from libra.errors import PlanError
from libra.hardware import load_gpu, load_shape
from libra.planner.arrangement_loop import MIXED_MARGIN_FRAC
from libra.planner.build_plan import plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.plan import Plan
from libra.planner.replan import Deployed, Rules
from libra.planner.search import Planner
from libra.planner.snapshot import Corrections, PlanningSnapshot


def snapshot(eta: int = 0) -> PlanningSnapshot:
    lengths = TrajectoryTotals.of(512.0, np.linspace(400, 4000, 48), observation_tokens=8000.0)
    return PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, lengths, tp=(1, 2), eta=eta)


def overlapped(factor: float = 1.0) -> PlanningSnapshot:
    lengths = TrajectoryTotals.of(256.0, np.linspace(200, 2000, 24) * factor)
    return PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, lengths, tp=(1, 2))


@pytest.fixture(scope="module")
def split() -> Plan:
    return plan(snapshot())


def test_a_constant_error_is_gone_after_one_step_and_noise_is_measured() -> None:
    learned = Learned().after(10.0, 25.0)
    assert learned.factor == pytest.approx(2.5)
    assert learned.noise_frac == 0.0
    rng = np.random.default_rng(0)
    for _ in range(200):
        learned = learned.after(10.0, 25.0 * math.exp(0.1 * rng.normal()))
    assert learned.factor == pytest.approx(2.5, rel=0.15)
    assert 0.05 < learned.noise_frac < 0.2


def test_a_drift_is_followed() -> None:
    learned, predicted = Learned(), []
    for step in range(40):
        realised = 10.0 * 1.02**step
        predicted.append(10.0 * learned.factor / realised - 1)
        learned = learned.after(10.0, realised)
    assert abs(predicted[-1]) < 0.15


def test_a_step_is_both_phases_on_their_gpus_and_the_change() -> None:
    shared = shared_plan(snapshot(), Sharing(2, 1, 3.0), Planner())
    engines = plan(replace(snapshot(), fixed_train_gpus=2))
    trainer = plan(replace(snapshot(), fixed_train_gpus=7))
    assert shared.plan.rollout_s == engines.rollout_s
    assert shared.train_s == trainer.train_s
    assert shared.step_s == pytest.approx(engines.rollout_s + trainer.train_s + 3.0)
    assert (shared.train_gpus, shared.plan.rollout_gpus, shared.shared_gpus) == (7, 6, 5)


def test_sharing_is_proposed_where_it_pays_and_not_where_changes_cost_more(split: Plan) -> None:
    planner = Planner()
    cheap = proposal(snapshot(), planner, Sharing(1, 0, 0.0))
    assert cheap.shared_gpus == 7
    assert cheap.step_s < split.step_s
    assert proposal(snapshot(), planner, Sharing(1, 0, split.step_s)).shared_gpus == 0


def test_a_shared_layout_differs_from_a_split() -> None:
    shared = shared_plan(snapshot(), Sharing(1, 0, 0.0), Planner()).deployed
    assert shared.same_layout(shared)
    assert not shared.same_layout(replace(shared, shared_gpus=0))
    assert not shared.same_layout(Deployed(shared.train_gpus, shared.engines, shared.concurrency))


def test_the_loop_shares_and_predicts_what_it_shares(split: Plan) -> None:
    deployed = split_plan(snapshot(), Planner()).deployed
    loop = PlanLoop(snapshot(), deployed, Rules(confirmations=1, first_cost_s=0.0), Sharing(1, 0, 0.1))
    outcome = loop.after(0, split.rollout_s, split.train_s, snapshot().workload, 20)
    assert outcome.considered.accepted
    assert outcome.proposed.deployed.shared_gpus == 7
    assert outcome.next_step_s == pytest.approx(outcome.proposed.step_s)
    again = loop.after(1, outcome.proposed.plan.rollout_s, outcome.proposed.train_s, snapshot().workload, 19)
    assert again.considered.reason == "this is what runs"


@pytest.mark.parametrize(("eta", "sharing"), [(1, Sharing(1, 0, 0.0)), (0, Sharing(4, 4, 0.0))])
def test_a_split_that_cannot_be_shared_is_refused(eta: int, sharing: Sharing) -> None:
    with pytest.raises(PlanError, match="give eta 0 and smaller cores"):
        shared_plan(snapshot(eta), sharing, Planner())


@pytest.mark.parametrize(("gain_frac", "taken"), [(MIXED_MARGIN_FRAC / 2, False), (MIXED_MARGIN_FRAC * 1.1, True)])
def test_mixed_engines_are_proposed_only_where_they_gain_more_than_unknown_lengths_cost(
    gain_frac: float, taken: bool, split: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket,) = split.buckets
    alike = {tp: replace(split, step_s=100.0 + tp, buckets=(replace(bucket, tp=tp),)) for tp in (1, 2)}
    both = replace(split, step_s=101.0 * (1 - gain_frac), buckets=(bucket, replace(bucket, tp=2)))

    def planned(asked: PlanningSnapshot, planner: Planner, *, alternatives: bool) -> Plan:
        return both if len(asked.tp) > 1 else alike[asked.tp[0]]

    monkeypatch.setattr(plan_loop, "plan", planned)
    assert proposal(snapshot(), Planner()).plan is (both if taken else alike[1])


def test_the_loop_learns_a_slower_machine() -> None:
    truth, start = Corrections(rollout=3.0, training=0.5), overlapped()
    loop = PlanLoop(start, SharedLayout(2, {1: 6}, {1: 256}))
    rng, errors = np.random.default_rng(1), []
    for iteration in range(11):
        workload = overlapped(float(rng.uniform(0.9, 1.1))).workload
        now = loop.replanner.deployed
        fixed = {tp: now.engines.get(tp, 0) for tp in (1, 2)}
        real = plan(
            replace(start, workload=workload, corrections=truth, fixed_train_gpus=now.train_gpus, fixed_engines=fixed)
        )
        outcome = loop.after(iteration, real.rollout_s, real.train_s, workload, 100 - iteration)
        errors.append(abs(outcome.predicted_step_s / real.step_s - 1.0))
    assert errors[0] > 0.4  # nothing known: off by the factor of three
    assert max(errors[1:]) < 0.25
    assert errors[10] < 0.15
