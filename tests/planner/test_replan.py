"""A change is made when it pays, not when it seems to; and the model learns what it is off by."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PlanError
from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.replan import Deployed, Proposal, Rebucket, Replanner, Rules, SetConcurrency, SetRole
from libra.planner.snapshot import Corrections, PlanningSnapshot


def small_snapshot(num=24, factor=1.0):
    tokens = np.linspace(200, 2000, num) * factor
    return PlanningSnapshot(
        load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, TrajectoryTotals.of(256.0, tokens), tp=(1, 2)
    )


@pytest.fixture(scope="module")
def some_plan():
    return plan(small_snapshot())


def other_than(plan):
    return Deployed(plan.training.gpus + 1, {1: 1}, {1: 8})


def consider(replanner, iteration, current_s, plan, remaining, noise_frac=0.0):
    return replanner.weigh(iteration, current_s, Proposal(Deployed.of(plan), plan.step_s), remaining, noise_frac)


@given(
    noise=st.lists(st.floats(-0.2, 0.2), min_size=30, max_size=60), drift=st.floats(-0.01, 0.01),
    confirmations=st.integers(1, 4), rest=st.integers(0, 6),
)  # fmt: skip
def test_drifting_noise_never_flaps_beyond_the_bound(noise, drift, confirmations, rest, some_plan):
    rules = Rules(confirmations=confirmations, rest_iterations=rest, first_cost_s=0.0)
    replanner = Replanner(other_than(some_plan), rules)
    plans = [dataclasses.replace(some_plan, training=dataclasses.replace(some_plan.training, gpus=g)) for g in (1, 2)]
    changes = []
    for iteration, value in enumerate(noise):
        # The proposal is always the other of two layouts, and looks better by noise on a drifting level.
        proposal = plans[replanner.deployed.train_gpus == 1]
        current_s = proposal.step_s * math.exp(value + drift * iteration)
        if consider(replanner, iteration, current_s, proposal, 1000).accepted:
            changes.append(iteration)
    assert len(changes) <= 1 + len(noise) / max(confirmations, rest)
    assert all(b - a > rest for a, b in pairwise(changes))
    assert not changes or changes[0] >= confirmations - 1


@given(noise=st.lists(st.floats(-0.04, 0.04), min_size=20, max_size=50))
def test_noise_below_the_least_gain_changes_nothing(noise, some_plan):
    replanner = Replanner(other_than(some_plan), Rules(first_cost_s=0.0))
    for iteration, value in enumerate(noise):
        assert not consider(replanner, iteration, some_plan.step_s * (1 + value), some_plan, 10**6).accepted


def test_a_gain_is_weighed_against_what_changes_cost_over_the_iterations_that_remain(some_plan):
    rules = Rules(confirmations=1, cost_factor=1.0)
    current_s = some_plan.step_s * 1.5
    gain_s = current_s - some_plan.step_s
    with pytest.raises(PlanError):
        Rules(confirmations=0)
    for remaining, cost_s, accepted in ((10, 9 * gain_s, True), (10, 11 * gain_s, False), (1, 0.5 * gain_s, True)):
        replanner = Replanner(other_than(some_plan), rules)
        replanner.changed(cost_s)
        considered = consider(replanner, 5, current_s, some_plan, remaining)
        assert considered.accepted is accepted
        assert considered.gain_s == pytest.approx(remaining * gain_s)
        assert (considered.cost_s, considered.num_changes) == (pytest.approx(cost_s), 1)
        assert bool(replanner.orders) is accepted


def test_what_predictions_are_off_by_is_no_gain(some_plan):
    replanner = Replanner(other_than(some_plan), Rules(confirmations=1, first_cost_s=0.0))
    assert not consider(replanner, 0, some_plan.step_s * 1.2, some_plan, 100, noise_frac=0.15).accepted
    assert consider(replanner, 1, some_plan.step_s * 1.2, some_plan, 100, noise_frac=0.02).accepted


def test_commands_turn_what_runs_into_the_plan_and_nothing_else(some_plan):
    wanted = Deployed.of(some_plan)
    replanner = Replanner(Deployed(wanted.train_gpus + 2, {1: 1}, {1: 3}), Rules(confirmations=1, first_cost_s=0.0))
    considered = consider(replanner, 0, some_plan.step_s * 2, some_plan, 10)
    role, rebucket, *concurrency = replanner.orders
    assert role == SetRole("rollout", 2, considered.reason)
    assert isinstance(rebucket, Rebucket)
    assert dict(rebucket.engines) == dict(wanted.engines)
    assert all(isinstance(command, SetConcurrency) for command in concurrency)
    assert consider(replanner, 1, some_plan.step_s * 2, some_plan, 10).reason == "this is what runs"


def test_corrections_scale_the_plan():
    slow = plan(dataclasses.replace(small_snapshot(), corrections=Corrections(2.0, 1.0)))
    assert slow.rollout_s == pytest.approx(2 * plan(small_snapshot()).rollout_s, rel=0.2)
