"""A batch played through on engines whose passes are known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.planner.cost import TrajectoryTotals
from libra.planner.drain import EvaluatedEngine, rollout_seconds
from libra.types import StepSeconds

FLAT = StepSeconds(0.01, 0.0, 0.0, 0.0, 100, 0.0)


def batch(*tokens, prompt=0.0, tool_s=0.0):
    return TrajectoryTotals.of(np.full(len(tokens), prompt), np.array(tokens), tool_wait_s=tool_s)


def test_who_is_alone_takes_a_pass_per_token_and_its_prompt_and_tools_beside():
    steps = StepSeconds(0.01, 0.002, 1e-5, 1e-4, 100, 0.0)
    one = rollout_seconds(batch(100, prompt=50, tool_s=3.0), [EvaluatedEngine(steps, 4)])
    pass_s = 0.01 + 0.002 + 1e-5 * 100
    assert one == pytest.approx(50 * 1e-4 + 100 * pass_s + 3.0)


def test_slots_and_memory_bound_how_many_run_at_once():
    four = batch(100, 100, 100, 100)
    assert rollout_seconds(four, [EvaluatedEngine(FLAT, 4)]) == pytest.approx(1.0)
    assert rollout_seconds(four, [EvaluatedEngine(FLAT, 2)]) == pytest.approx(2.0)
    assert rollout_seconds(four, [EvaluatedEngine(FLAT, 4, kv_tokens=250)]) == pytest.approx(2.0)
    assert rollout_seconds(four, [EvaluatedEngine(FLAT, 4, kv_tokens=1)]) == pytest.approx(4.0)  # one at a time runs
    assert rollout_seconds(four, [EvaluatedEngine(FLAT, 1)] * 2) == pytest.approx(2.0)
    assert rollout_seconds(batch(10, 10, 10, 30), [EvaluatedEngine(FLAT, 1)] * 2) == pytest.approx(0.3)  # longest first


def test_a_faster_engine_takes_more():
    quick = EvaluatedEngine(StepSeconds(0.001, 0.001, 0.0, 0.0, 9, 0.0), 8)
    slow = EvaluatedEngine(StepSeconds(0.004, 0.001, 0.0, 0.0, 9, 0.0), 8)
    both = rollout_seconds(batch(*[100.0] * 8), [quick, slow])
    assert both < min(rollout_seconds(batch(*[100.0] * 8), [quick]), rollout_seconds(batch(*[100.0] * 8), [slow]))


@given(st.lists(st.floats(1, 500), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 4))
def test_no_batch_is_done_before_its_work_and_its_longest_nor_after_one_by_one(tokens, slots, engines):
    steps = StepSeconds(0.01, 0.001, 0.0, 0.0, 10, 0.0)
    found = rollout_seconds(batch(*tokens), [EvaluatedEngine(steps, slots)] * engines)
    assert math.isfinite(found)
    assert found >= max(tokens) * steps.step_s(1, 0) * (1 - 1e-9)
    assert found >= sum(tokens) * steps.sequence_s / engines * (1 - 1e-9)
    assert found <= sum(tokens) * steps.step_s(1, 0) * (1 + 1e-9)
