import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import advantages as adv

rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def group(reward, **changes):
    size = len(reward)
    facts = {"valid": [True] * size, "num_tokens": [4] * size, "finished": [True] * size, **changes}
    return adv.GroupRewards(np.array(reward), **{name: np.array(values) for name, values in facts.items()})


def of_one(reward, valid=None, **options):
    return adv.batch_advantages([group(reward, **({} if valid is None else {"valid": valid}))], "grpo", **options)[0][0]


def test_a_group_by_hand():
    # mean 2, deviations -1 0 1, unbiased standard deviation 1
    np.testing.assert_allclose(of_one([1, 2, 3], eps=0), [-1, 0, 1])
    np.testing.assert_allclose(of_one([0, 0, 3], normalize_std=False), [-1, -1, 2])
    reward, number = torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.int64)
    assert adv.grpo(reward, number, ddof=0, eps=0).tolist() == [-1, 1]


@given(rewards, st.data())
def test_excluded_samples_are_as_if_absent(values, data):
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    got = of_one(np.where(valid, values, np.nan), valid)
    assert (got[~valid] == 0).all()
    if valid.sum() > 1:
        np.testing.assert_allclose(got[valid], of_one(np.array(values)[valid]))
    else:
        assert (got == 0).all()  # one survivor has nobody to be compared with


def test_a_group_of_one_keeps_its_reward():
    assert of_one([3.0], normalize_std=False) == [3.0]
    assert of_one([3.0], eps=0) == [3.0]
    for estimate in (adv.grpo, adv.rloo):
        assert estimate(torch.tensor([3.0]), torch.tensor([7]), singleton="zero") == torch.tensor([0.0])


def test_rewards_that_cannot_be_compared_are_refused():
    with pytest.raises(TrainError):
        adv.batch_advantages([group([1.0, float("nan")])], "grpo")
    assert adv.grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def groups_of(values):
    return torch.tensor(values, dtype=torch.float64), torch.tensor([index % 3 for index in range(len(values))])


@given(rewards, st.lists(st.integers(1, 50), min_size=16, max_size=16), st.floats(-50, 50), st.floats(0.1, 10))
def test_estimators_shift_and_scale_as_they_should(values, lengths, shift, scale):
    reward, group = groups_of(values)
    length = torch.tensor(lengths[: len(values)])
    sizes = torch.bincount(group)[group]
    paired = sizes > 1  # a lone sample keeps its reward, shift and all
    for estimate in (
        lambda r: adv.rloo(r, group),
        lambda r: adv.opo(r, length, group),
        lambda r: adv.grpo(r, group, normalize_std=False),
    ):
        base = estimate(reward)[paired]
        torch.testing.assert_close(estimate(reward + shift)[paired], base, rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(estimate(reward * scale)[paired], base * scale, rtol=1e-9, atol=1e-7)
    base = adv.opo(reward, length, group)
    for number in range(3):
        weighted = (base * length)[(group == number) & paired].sum()  # its baseline is the length-weighted mean
        assert abs(float(weighted)) < 1e-6


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_give_exactly_zero_everywhere(value, size):
    reward, one = torch.full((size,), value, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    length = torch.arange(1, size + 1)
    assert (of_one([value] * size) == 0).all()
    for got in (adv.rloo(reward, one), adv.opo(reward, length, one), adv.reinforce_pp_baseline(reward, length, one)):
        assert (got == 0).all()
    assert (adv.whiten(reward, length) == 0).all()


def test_returns_run_over_observations_and_stop_at_padding():
    reward = torch.tensor([[0.0, 0.0, 5.0, 2.0, 9.0]])
    _, returns = adv.reinforce_pp(reward, torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]]), gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0, 0.0, 2.0, 0.0]]
    assert adv.reinforce_pp(torch.zeros(2, 0), torch.zeros(2, 0))[0].shape == (2, 0)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_groups_through_each_estimator(estimator):
    groups = [
        group([0.0, 1.0, 2.0], num_tokens=[2, 4, 6]),
        group([1.0, np.nan, 1.0], valid=[True, False, True], finished=[True, True, False]),
        group([7.0, np.nan, np.nan], valid=[True, False, False]),
        group([np.nan] * 2, valid=[False] * 2),
    ]
    advantages, trains = adv.batch_advantages(groups, estimator)
    assert [len(a) for a in advantages] == [3, 3, 3, 2]
    assert all(np.isfinite(a).all() for a in advantages)
    assert advantages[0][0] < advantages[0][1] < advantages[0][2]
    assert advantages[1][1] == 0
    if estimator in ("grpo", "rloo", "opo"):
        assert (advantages[1] == 0).all()
    if estimator != "reinforce_pp":
        assert (advantages[2] == 0).all()  # one survivor has nobody to be compared with
    assert [t.tolist() for t in trains] == [g.valid.tolist() for g in groups]
    _, filtered = adv.batch_advantages(groups, estimator, drop_uniform_groups=True)
    assert [t.tolist() for t in filtered] == [[True] * 3, [False] * 3, [False] * 3, [False] * 2]
    _, filtered = adv.batch_advantages(groups, estimator, drop_truncated=True)
    assert filtered[1].tolist() == [True, False, False]
    assert adv.batch_advantages([], estimator) == ([], [])


def test_a_group_without_its_greedy_answer_is_left_out_and_a_uniform_one_can_be():
    nan = float("nan")
    groups = [
        adv.GroupRewards(
            np.array(rewards), ~np.isnan(rewards), np.full(len(rewards), 5), np.ones(len(rewards), np.bool_)
        )
        for rewards in ([0.5, 1.0, nan], [nan, 1.0], [1.0, 1.0])
    ]
    advantages, trains = adv.batch_advantages(groups, "remax")
    assert [one.tolist() for one in advantages] == [[0.0, 0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert [one.tolist() for one in trains] == [[False, True, False], [False, False], [False, True]]
    _, trains = adv.batch_advantages(groups, "remax", drop_uniform_groups=True)
    assert trains[2].tolist() == [False, False]
