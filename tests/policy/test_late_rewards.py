"""Late rewards: each counts once, no group waits for ever, and corrections add up to what the final rewards would have given."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.policy.late_rewards import GuessWorth, WaitingGroup, age_weight, correction, guessed_share, settle

ARRIVALS = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 2)), st.integers(1, 12), max_size=18)
"""By batch of the group and sample: the batch by which the reward has come."""


def test_the_weight_of_age_is_that_of_the_paper():
    assert age_weight(0, 50.0) == 1.0
    assert age_weight(50, 50.0) == pytest.approx(1 / math.e)
    assert [age_weight(delay, 1000.0) for delay in (5, 20)] == [math.exp(-0.005), math.exp(-0.02)]


@given(ARRIVALS, st.integers(1, 4))
def test_every_reward_counts_once_or_is_dropped_and_no_group_waits_longer(comes, versions):
    waiting = ()
    counted = {}
    dropped = set()
    for batch in range(12):
        came = {(start, 0, sample): 1.0 for (start, sample), at in comes.items() if at <= batch}
        settled = settle(waiting, batch, came, versions=versions)
        for arrival in settled.arrivals:
            for sample in arrival.rewards:
                place = (arrival.group.iteration, 0, sample)
                assert place not in counted and place not in dropped and 1 <= arrival.delay <= versions
                assert arrival.delay == batch - arrival.group.batch
                counted[place] = batch
        assert not dropped & set(settled.dropped)
        dropped |= set(settled.dropped)
        assert all(batch - group.batch < versions and group.missing for group in settled.waiting)
        missing = tuple(sorted(sample for start, sample in comes if start == batch))
        waiting = (*settled.waiting, *((WaitingGroup(batch, 0, batch, missing),) if missing else ()))
    assert not waiting
    for (start, sample), at in comes.items():
        first = max(at, start + 1)
        place = (start, 0, sample)
        assert counted.get(place) == (first if first <= start + versions else None)
        assert (place in dropped) == (place not in counted)


@given(st.lists(st.lists(st.floats(-2, 2), min_size=4, max_size=4), min_size=2, max_size=5), st.floats(1, 100))
def test_corrections_of_one_age_add_up_to_the_whole_difference(advantages, tau):
    steps = [np.array(each) for each in advantages]
    parts = [correction(before, after, delay=3, tau=tau) for before, after in pairwise(steps)]
    np.testing.assert_allclose(sum(parts), age_weight(3, tau) * (steps[-1] - steps[0]), atol=1e-12)


def test_a_guess_counts_for_what_guesses_were_worth_and_costs_no_noise():
    draw = np.random.default_rng(0)
    worth, final = GuessWorth(), draw.normal(size=(400, 50, 8))
    guessed = 0.3 * final + draw.normal(size=final.shape)  # slope of final on guessed 0.3 / 1.09
    for batch in range(100):
        worth = worth.after(list(zip(guessed[batch], final[batch], strict=True)))
    assert worth.slope == pytest.approx(0.3 / 1.09, abs=0.03)
    noise = {weight: (weight * guessed).var() + (final - weight * guessed).var() for weight in (1.0, worth.slope)}
    assert noise[worth.slope] == pytest.approx(final.var(), rel=0.02)
    assert noise[1.0] > 2.5 * final.var()


def test_what_guesses_are_worth_is_a_weight_and_stands_without_evidence():
    guessed, none = np.array([1.0, -1.0]), np.zeros(2)
    assert GuessWorth().slope == GuessWorth().after([]).slope == GuessWorth().after([(none, guessed)]).slope == 1.0
    assert GuessWorth().after([(guessed, -3 * guessed)]).slope == 0.0
    assert GuessWorth().after([(guessed, 3 * guessed)]).slope == 1.0
    for scale in (1e-6, 1.0, 1e6):  # of the rewards: their unit says nothing of their worth
        assert GuessWorth().after([(scale * guessed, 0.5 * scale * guessed)]).slope == pytest.approx((2 * 0.5 + 1) / 3)
    assert guessed_share(np.array([True, False, True, True]), (0, 1)) == pytest.approx(1 / 3)
    assert guessed_share(np.zeros(4, np.bool_), (0, 1)) == 0.0
