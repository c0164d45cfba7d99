"""Steps with more or fewer hybrids training: predicted from measurement alone, and how wrong that was."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PlanError
from libra.planner.measured_step import StepForecast, Taken
from libra.planner.split_forecast import Batch, SplitForecast, Splits, TrainingForecast

TOKENS_S = 100.0
"""Tokens per second of one engine of the made-up run."""


THREE = Splits([Counter(e=3), Counter(e=2), Counter(e=1)], 0, 1)
"""Three engines, of which two are hybrids that roll out, and one core trainer."""


def train_s(batch, replicas):
    return 0.2 + batch.trained_tokens / replicas / 1000.0


LONG, HEAVY = Batch(3000.0, 3500.0), Batch(300.0, 30000.0)


def test_a_step_is_predicted_for_other_splits_from_what_this_one_took():
    loop, forecast = SplitForecast(), StepForecast()
    for k in range(8):
        batch = LONG if k % 2 else HEAVY
        rollout_s = batch.generated_tokens / 3 / TOKENS_S
        taken = Taken(
            rollout_s, train_s(batch, 1), 0.0, rollout_s + train_s(batch, 1), {"e": int(batch.generated_tokens)}, []
        )
        forecast = forecast.after(taken, {"e": 3})
        loop.learn(forecast, THREE, batch, 1, taken.train_s, taken.step_s, overlap=False)
    now = loop.expected(forecast, THREE, LONG, 0, overlap=False)
    other = loop.expected(forecast, THREE, LONG, 2, overlap=False)
    assert now is not None
    assert other is not None
    assert other.rollout_s == pytest.approx(3 * now.rollout_s)  # one engine instead of three
    assert now.train_s == pytest.approx(train_s(LONG, 1), rel=0.15)
    assert other.train_s == pytest.approx(train_s(LONG, 3), rel=0.25)


def test_training_is_proportional_until_the_run_says_otherwise():
    first = TrainingForecast().after(1000.0, 1, 10.0)
    assert first.expected_s(1000.0, 2) == pytest.approx(5.0)
    known = first
    for _ in range(20):  # two replicas are no quicker than one
        known = known.after(1000.0, 2, 10.0).after(1000.0, 1, 10.0)
    assert known.expected_s(1000.0, 2) > 7.0
    assert TrainingForecast().expected_s(1000.0, 1) == 0.0
    assert known.after(0.0, 1, 3.0) == known
    with pytest.raises(PlanError, match="0 replicas"):
        known.after(1.0, 0, 1.0)


SECONDS = st.floats(0.8, 1.25)


def judged(slower, batches=None):
    """A loop after iterations in which rollout and training took so many times as long as usual."""
    loop, forecast = SplitForecast(), StepForecast()
    for k, (in_rollout, in_training) in enumerate(slower):
        batch = batches[k] if batches else LONG
        rollout_s = in_rollout * batch.generated_tokens / 3 / TOKENS_S
        training_s = in_training * train_s(batch, 1)
        loop.learn(forecast, THREE, batch, 1, training_s, rollout_s + training_s, overlap=False)
        taken = Taken(rollout_s, training_s, 0.0, rollout_s + training_s, {"e": int(batch.generated_tokens)}, [])
        forecast = forecast.after(taken, {"e": 3})
    return loop


def test_the_start_of_a_run_is_no_noise():
    """What its first, slow iteration makes the second one be mispredicted by would forbid every change for long."""
    assert judged([(3.0, 3.0), (1.0, 1.0)]).errors == []
    assert len(judged([(3.0, 3.0), (1.0, 1.0), (1.0, 1.0)]).errors) == 1


@given(st.lists(SECONDS, min_size=4, max_size=12))
def test_a_machine_that_is_slower_in_all_it_does_is_no_noise(slower):
    """Both phases take so many times as long: how much is gained by another split stays what it was."""
    assert judged([(each, each) for each in slower]).noise_frac < 0.03


def test_phases_that_vary_apart_are_noise():
    by_turns = [(1.0, 1.0), (1.0, 1.0), *[(1.6, 0.7), (0.7, 1.6)] * 5]
    assert judged(by_turns).noise_frac > 0.2 > 0.01 > judged([(1.0, 1.0)] * 12).noise_frac


def test_one_iteration_that_is_judged_wrong_is_no_noise_and_many_are():
    once = judged([*[(1.0, 1.0)] * 8, (3.0, 1.0), (1.0, 1.0)])
    assert max(once.errors) > 0.1 > 0.01 > once.noise_frac
    often = judged([*[(1.0, 1.0)] * 4, *[(3.0, 1.0), (1.0, 1.0)] * 3])
    assert often.noise_frac > 0.1


def test_where_steps_overlap_the_error_of_the_step_is_the_noise():
    loop, forecast = SplitForecast(), StepForecast()
    for step_s in (10.0, 10.0, 10.0, 12.5):
        loop.learn(forecast, THREE, LONG, 1, 3.7, step_s, overlap=True)
        forecast = forecast.after(Taken(step_s, 3.7, 0.0, step_s, {"e": 3000}, []), {"e": 3})
    assert loop.errors == pytest.approx([0.0, 0.2])
