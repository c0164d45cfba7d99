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
from libra.planner.arrangements import ROLES, Deployed
from libra.planner.build_plan import plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.replan import Replanner
from libra.planner.snapshot import PlanningSnapshot


def small_snapshot(num=24, factor=1.0):
    tokens = np.linspace(200, 2000, num) * factor
    return PlanningSnapshot(
        load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, TrajectoryTotals.of(256.0, tokens), tp=(1, 2)
    )


@pytest.fixture(scope="module")
def some_plan():
    return plan(small_snapshot())


def consider(replanner, iteration, current_s, plan, remaining, kinds=(ROLES,)):
    return replanner.weigh(iteration, current_s, Deployed.of(plan), plan.step_s, remaining, kinds=kinds)


@given(
    noise=st.lists(st.floats(-0.2, 0.2), min_size=30, max_size=60), drift=st.floats(-0.01, 0.01),
    confirmations=st.integers(1, 4), rest=st.integers(0, 6),
)  # fmt: skip
def test_drifting_noise_never_flaps_beyond_the_bound(noise, drift, confirmations, rest, some_plan):
    replanner = Replanner(confirmations=confirmations, rest_iterations=rest, first_cost_s=0.0)
    changes = []
    for iteration, value in enumerate(noise):
        # The proposal is always another layout, and looks better by noise on a drifting level.
        current_s = some_plan.step_s * math.exp(value + drift * iteration)
        if consider(replanner, iteration, current_s, some_plan, 1000).accepted:
            changes.append(iteration)
    assert len(changes) <= 1 + len(noise) / max(confirmations, rest)
    assert all(b - a > rest for a, b in pairwise(changes))
    assert not changes or changes[0] >= confirmations - 1


@given(noise=st.lists(st.floats(-0.04, 0.04), min_size=20, max_size=50))
def test_noise_below_the_least_gain_changes_nothing(noise, some_plan):
    replanner = Replanner(first_cost_s=0.0)
    for iteration, value in enumerate(noise):
        assert not consider(replanner, iteration, some_plan.step_s * (1 + value), some_plan, 10**6).accepted


def test_a_gain_is_weighed_against_what_changes_cost_over_the_iterations_that_remain(some_plan):
    current_s = some_plan.step_s * 1.5
    gain_s = current_s - some_plan.step_s
    with pytest.raises(PlanError):
        Replanner(confirmations=0)
    for remaining, cost_s, accepted in ((10, 9 * gain_s, True), (10, 11 * gain_s, False), (1, 0.5 * gain_s, True)):
        replanner = Replanner(confirmations=1, cost_factor=1.0)
        replanner.changed(cost_s)
        considered = consider(replanner, 5, current_s, some_plan, remaining)
        assert considered.accepted is accepted
        assert considered.gain_s == pytest.approx(remaining * gain_s)
        assert (considered.cost_s, considered.num_changes) == (pytest.approx(cost_s), 1)


def test_the_present_layout_is_no_change(some_plan):
    replanner = Replanner(confirmations=1, first_cost_s=0.0)
    assert consider(replanner, 1, some_plan.step_s * 2, some_plan, 10, kinds=()).reason == "this is what runs"


def test_a_factor_scales_training():
    slow = plan(dataclasses.replace(small_snapshot(), training_factor=2.0, fixed_train_gpus=4))
    assert slow.train_s == pytest.approx(2 * plan(dataclasses.replace(small_snapshot(), fixed_train_gpus=4)).train_s)
