"""GPUs that do both within a synchronous step: worked out from the same costs as a split, taken where they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.errors import PlanError
from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import Workload
from libra.planner.phase_sharing import Sharing, shared_plan
from libra.planner.plan import Plan
from libra.planner.plan_commands import Deployed, ShareGPUs, commands
from libra.planner.plan_loop import PlanLoop, RealisedStep
from libra.planner.proposal import MIXED_MARGIN_FRAC, proposal
from libra.planner.replan import Rules
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot


def snapshot(eta: int = 0) -> PlanningSnapshot:
    lengths = Workload.of(512.0, np.linspace(400, 4000, 48), observation_tokens=8000.0)
    return PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, lengths, tp=(1, 2), eta=eta)


@pytest.fixture(scope="module")
def split() -> Plan:
    return plan(snapshot())


def test_a_step_is_both_phases_on_what_each_may_use_and_the_change() -> None:
    shared = shared_plan(snapshot(), Sharing(2, 1, 3.0))
    engines = plan(replace(snapshot(), fixed_train_gpus=2))
    trainer = plan(replace(snapshot(), fixed_train_gpus=7))
    assert shared.rollout_s == engines.rollout_s
    assert shared.train_s == trainer.train_s
    assert shared.step_s == pytest.approx(engines.rollout_s + trainer.train_s + 3.0)
    assert (shared.training.gpus, shared.rollout_gpus, shared.shared_gpus) == (7, 6, 5)
    assert shared.to_dict()["shared_gpus"] == 5
    (without,) = shared.alternatives
    assert without.step_s == pytest.approx(engines.step_s)
    assert without.slower_frac == pytest.approx(engines.step_s / shared.step_s - 1)


def test_sharing_is_proposed_where_it_pays_and_not_where_changes_cost_more(split: Plan) -> None:
    planner = Planner()
    cheap = proposal(snapshot(), planner, Sharing(1, 0, 0.0))
    assert cheap.shared_gpus == 7
    assert cheap.step_s < split.step_s
    dear = proposal(snapshot(), planner, Sharing(1, 0, split.step_s))
    assert dear.shared_gpus == 0


def test_what_is_shared_is_asked_for_and_taken_back_in_commands(split: Plan) -> None:
    shared = Deployed.of(shared_plan(snapshot(), Sharing(1, 0, 0.0)))
    apart = Deployed.of(split)
    assert ShareGPUs(7, "why") in commands(apart, shared, (), "why")
    assert ShareGPUs(0, "why") in commands(shared, apart, (), "why")
    assert not commands(shared, shared, (), "why")
    assert not shared.same_layout(replace(shared, shared_gpus=0))


def test_the_loop_shares_and_predicts_what_it_shares(split: Plan) -> None:
    sharing = Sharing(1, 0, 0.1)
    loop = PlanLoop(snapshot(), Deployed.of(split), Rules(confirmations=1, first_cost_s=0.0), sharing)
    outcome = loop.after(0, RealisedStep(split.rollout_s, split.train_s, split.step_s), snapshot().workload, 20)
    assert outcome.considered.accepted
    assert loop.replanner.deployed.shared_gpus == 7
    assert outcome.next_step_s == pytest.approx(outcome.plan.step_s)
    again = loop.after(1, RealisedStep(outcome.plan.rollout_s, outcome.plan.train_s, 1.0), snapshot().workload, 19)
    assert again.considered.reason == "this is what runs"


@pytest.mark.parametrize(
    ("eta", "sharing", "says"),
    [
        (1, Sharing(1, 0, 0.0), "run.eta=0"),
        (0, Sharing(4, 4, 0.0), "leave nothing of 8"),
    ],
)
def test_what_cannot_be_shared_is_refused(eta: int, sharing: Sharing, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        shared_plan(snapshot(eta), sharing)
    with pytest.raises(PlanError, match="core trainer"):
        Sharing(0, 0, 0.0)


@pytest.mark.parametrize(("gain_frac", "taken"), [(MIXED_MARGIN_FRAC / 2, False), (MIXED_MARGIN_FRAC * 1.1, True)])
def test_mixed_engines_are_proposed_only_where_they_gain_more_than_not_knowing_lengths_costs(
    gain_frac: float, taken: bool, split: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket,) = split.buckets
    alike = {tp: replace(split, step_s=100.0 + tp, buckets=(replace(bucket, tp=tp),)) for tp in (1, 2)}
    both = replace(split, step_s=101.0 * (1 - gain_frac), buckets=(bucket, replace(bucket, tp=2)))

    def planned(asked: PlanningSnapshot, planner: Planner) -> Plan:
        return both if len(asked.tp) > 1 else alike[asked.tp[0]]

    monkeypatch.setattr("libra.planner.proposal.plan", planned)
    assert proposal(snapshot(), Planner()) is (both if taken else alike[1])
