"""The forecast of a run's next step: engines of several speeds, questions of several lengths; a batch drained."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.planner.cost import TrajectoryTotals
from libra.planner.drain import EvaluatedEngine, rollout_seconds
from libra.planner.step_forecast import StepForecast, Taken, TrainingForecast
from libra.types import StepSeconds

KINDS = {"fast": 1, "slow": 1}
SPEED = {"fast": 800.0, "slow": 200.0}
TRAIN_S, REST_S = 1.5, 0.1
FLAT = StepSeconds(0.01, 0.0, 0.0, 0.0, 100, 0.0)


def took(lengths, factor=1.0):
    """An iteration of these questions, 10 tokens to each character; engines share the tokens by their speeds."""
    questions = [(length, 10.0 * length) for length in lengths]
    tokens = sum(number for _, number in questions)
    rollout_s, total = tokens / sum(SPEED.values()) * factor, sum(SPEED.values())
    given = {kind: round(tokens * speed / total) for kind, speed in SPEED.items()}
    train_s, rest_s = TRAIN_S * factor, REST_S * factor
    return Taken(rollout_s, train_s, rest_s, rollout_s + train_s + rest_s, given, questions)


def expected(forecast, lengths, *, overlap=False):
    return forecast.expected(KINDS, lengths, overlap)


def test_one_iteration_is_enough_for_the_next_of_its_kind_and_nothing_is_not():
    assert StepForecast().expected(KINDS, [100.0], overlap=False) is None
    forecast = StepForecast().after(took([50.0, 150.0] * 8), KINDS)
    step = expected(forecast, [50.0, 150.0] * 8)
    assert step.rollout_s == pytest.approx(16.0, rel=1e-6)
    assert step.step_s == pytest.approx(16.0 + TRAIN_S + REST_S)
    assert expected(forecast, None).step_s == pytest.approx(step.step_s)
    assert expected(forecast, [50.0, 150.0] * 8, overlap=True).step_s == pytest.approx(16.0)
    assert forecast.tokens_per_s() == pytest.approx(SPEED)


def test_longer_questions_are_expected_to_take_longer():
    rng = np.random.default_rng(0)
    forecast = StepForecast()
    for _ in range(10):
        forecast = forecast.after(took(rng.uniform(20, 200, 16).tolist()), KINDS)
    for lengths in ([40.0] * 16, [180.0] * 16):
        true = took(lengths)
        assert expected(forecast, lengths).step_s == pytest.approx(true.step_s, rel=0.15)
        assert expected(forecast, lengths).tokens == pytest.approx(10 * sum(lengths), rel=0.15)


def test_an_engine_less_is_slower_by_its_own_speed():
    forecast = StepForecast().after(took([100.0] * 16), KINDS)
    for kinds, rollout_s in (({"fast": 1}, 16.0 * 1000 / 800), ({"fast": 2, "slow": 2}, 8.0)):
        found = forecast.expected(kinds, [100.0] * 16, overlap=False)
        assert found is not None and found.rollout_s == pytest.approx(rollout_s)
    assert forecast.expected({"unheard of": 3}, [100.0], overlap=False) is None


def test_the_first_iteration_counts_less_and_a_slower_machine_is_learned():
    lengths = [100.0] * 16
    forecast = StepForecast().after(took(lengths, factor=3.0), KINDS).after(took(lengths), KINDS)
    assert expected(forecast, lengths).step_s < 1.5 * took(lengths).step_s  # the mean of the two would be twice as long
    for _ in range(10):
        forecast = forecast.after(took(lengths, factor=2.0), KINDS)
    assert expected(forecast, lengths).step_s == pytest.approx(2 * took(lengths).step_s, rel=0.1)


@given(
    st.lists(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), min_size=1, max_size=6),
    st.lists(st.floats(0, 1e5), min_size=1, max_size=8),
)
def test_whatever_came_the_forecast_is_finite_and_positive(seen, asked):
    forecast = StepForecast()
    for lengths in seen:
        forecast = forecast.after(took(lengths), KINDS)
    for overlap in (False, True):
        step = expected(forecast, asked, overlap=overlap)
        assert all(math.isfinite(value) and value > 0 for value in dataclasses.astuple(step))


def test_training_follows_the_tokens_that_the_questions_are_expected_to_have_a_gradient_on():
    """Short questions are answered right by all samples, and have none; training takes 0.2 s and 1 ms a token."""

    def step(lengths):
        trained = [(length, max(0.0, length - 40.0)) for length in lengths]
        return dataclasses.replace(took(lengths), trained=trained, train_s=0.2 + 1e-3 * sum(t for _, t in trained))

    rng = np.random.default_rng(0)
    forecast = StepForecast()
    for _ in range(8):
        forecast = forecast.after(step(rng.uniform(50, 200, 16).tolist()), KINDS)
    usual = forecast.train_s / forecast.weight
    for lengths in ([60.0] * 16, [190.0] * 16):
        true = step(lengths).train_s
        assert expected(forecast, lengths).train_s == pytest.approx(true, rel=0.1)
        assert abs(usual / true - 1) > 0.3
    assert expected(forecast, None).train_s == pytest.approx(usual)


def test_training_is_proportional_until_the_run_says_otherwise():
    first = TrainingForecast().after(1000.0, 1, 10.0)
    assert first.expected_s(1000.0, 2) == pytest.approx(5.0)
    known = first
    for _ in range(20):  # two replicas are no quicker than one
        known = known.after(1000.0, 2, 10.0).after(1000.0, 1, 10.0)
    assert known.expected_s(1000.0, 2) > 7.0
    assert TrainingForecast().expected_s(1000.0, 1) == 0.0
    assert known.after(0.0, 1, 3.0) == known


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
