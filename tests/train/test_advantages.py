from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import group_advantages, grpo

rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def test_a_group_by_hand():
    # mean 2, deviations -1 0 1, unbiased standard deviation 1
    np.testing.assert_allclose(group_advantages([1, 2, 3], [True] * 3, eps=0), [-1, 0, 1])
    np.testing.assert_allclose(group_advantages([0, 0, 3], [True] * 3, normalize_std=False), [-1, -1, 2])
    np.testing.assert_allclose(group_advantages([0, 2], [True] * 2, ddof=0, eps=0), [-1, 1])


@given(rewards, st.booleans())
def test_a_group_sums_to_zero_and_keeps_order(values, normalize_std):
    got = group_advantages(values, [True] * len(values), normalize_std=normalize_std)
    assert abs(got.sum()) < 1e-6 * max(1, np.abs(got).max())
    order = np.argsort(values, kind="stable")
    assert (np.diff(got[order]) >= -1e-9).all()


@given(rewards, st.randoms(use_true_random=False))
def test_permuting_samples_permutes_advantages(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    group = torch.tensor([index % 3 for index in range(len(values))])
    reward = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(grpo(reward, group)[order], grpo(reward[order], group[order]), rtol=1e-9, atol=1e-9)


@given(rewards, st.data())
def test_excluded_samples_are_as_if_absent(values, data):
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    with_nan = np.where(valid, values, np.nan)
    got = group_advantages(with_nan, valid)
    assert (got[~valid] == 0).all()
    if valid.sum() > 1:
        np.testing.assert_allclose(got[valid], group_advantages(np.array(values)[valid], valid[valid]))
    else:
        assert (got == 0).all()  # one survivor has nobody to be compared with


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(value, size):
    assert (group_advantages([value] * size, [True] * size) == 0).all()


def test_a_group_of_one_keeps_its_reward():
    assert group_advantages([3.0], [True], normalize_std=False) == [3.0]
    assert group_advantages([3.0], [True], eps=0) == [3.0]
    assert grpo(torch.tensor([3.0]), torch.tensor([7]), singleton="zero") == torch.tensor([0.0])


def test_a_valid_reward_that_is_not_finite_is_refused():
    with pytest.raises(TrainError, match="sample 1 has reward nan"):
        group_advantages([1.0, float("nan")], [True, True])
    with pytest.raises(TrainError, match=r"shape \(2,\) and valid \(3,\)"):
        group_advantages([1.0, 2.0], [True] * 3)


def test_no_samples_give_no_advantages():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
