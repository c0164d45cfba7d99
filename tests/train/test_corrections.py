import math

import numpy as np
import pytest
import torch
from golden.peers import Padded
from hypothesis import given
from hypothesis import strategies as st

from libra.train import Sequences, corrections

log_ratios = st.lists(st.floats(-4, 4), min_size=1, max_size=12)


def one_sequence(values):
    return torch.tensor(values, dtype=torch.float64), Sequences(torch.zeros(len(values), dtype=torch.int64), 1)


@given(log_ratios, st.floats(1.01, 9), st.sampled_from(["token", "sequence", "geometric"]))
def test_truncation_and_cutting_agree_inside_the_bounds(values, high, level):
    log_ratio, sequences = one_sequence(values)
    free = corrections.importance_weights(log_ratio, sequences, level=level, action="none")
    truncated = corrections.importance_weights(log_ratio, sequences, level=level, high=high)
    cut = corrections.importance_weights(log_ratio, sequences, level=level, action="mask", low=1 / high, high=high)
    torch.testing.assert_close(truncated, free.clamp(max=high))
    assert torch.equal(cut, torch.where((free >= 1 / high) & (free <= high), free, torch.zeros_like(free)))
    if level != "token":
        assert (free == free[0]).all()


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float64, 1.000000005), (torch.float32, 1.0)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_mean_of_weights_counts_as_the_peer_does(level, dtype, expected):
    """verl divides by tokens + 1e-8: two tokens of weight 1 have the mean 1 / 1.000000005."""
    zeros = torch.zeros(1, 2, dtype=dtype)
    weights = corrections.importance_weights(zeros, Padded(torch.ones(1, 2)), level=level, normalize=True)
    assert weights.tolist() == [[pytest.approx(expected, abs=1e-15)] * 2]


def test_an_empty_mask_and_extreme_ratios():
    rows = Padded(torch.zeros(2, 3))
    nan = torch.full((2, 3), float("nan"))
    for level in ("token", "sequence", "geometric"):
        assert (corrections.importance_weights(nan, rows, level=level, normalize=True) == 0).all()
    assert not corrections.rejection_mask(nan, rows, level="sequence", reduce="max", high=1.0).any()
    assert not corrections.m2po_mask(nan, rows).any()
    far, sequences = one_sequence([1e4, -1e4])
    assert torch.isfinite(corrections.importance_weights(far, sequences, high=None)).all()


@given(log_ratios, st.floats(1e-3, 4), st.booleans())
def test_m2po_masks_the_fewest_tokens(values, threshold, directed):
    log_ratio, sequences = one_sequence(values)
    advantage = torch.ones_like(log_ratio) if directed else None
    keep = corrections.m2po_mask(log_ratio, sequences, threshold=threshold, advantage_N=advantage)
    square = log_ratio.square()
    candidates = square[log_ratio > 0] if directed else square
    fixed = float(square.sum() - candidates.sum()) if directed else 0.0
    rest = len(values) - len(candidates)
    for removed in range(len(candidates) + 1):  # brute force: the largest go first
        left = float(candidates.sort().values[: len(candidates) - removed].sum()) + fixed
        if left <= threshold * (len(candidates) - removed + rest) * (1 + 1e-12) or removed == len(candidates):
            break
    assert int((~keep).sum()) == removed
    if directed:
        assert keep[log_ratio <= 0].all()


def test_rejection_metrics_by_hand():
    d, sequences = one_sequence([0.5, -0.5, 1.0])
    e = math.e
    for metric, values in {
        "ratio": [e**0.5, e**-0.5, e], "k1": [0.5, -0.5, 1.0], "k2": [0.125, 0.125, 0.5],
        "k3": [e**0.5 - 1.5, e**-0.5 - 0.5, e - 2], "k3-reverse": [e**-0.5 - 0.5, e**0.5 - 1.5, e**-1],
    }.items():  # fmt: skip
        middle = float(np.median(values)) + 1e-12
        got = corrections.rejection_mask(d, sequences, metric=metric, high=middle)
        assert got.tolist() == [value <= middle for value in values], metric
        low = corrections.rejection_mask(d, sequences, metric=metric, low=middle)
        assert low.tolist() == [value >= middle for value in values], metric
    assert corrections.rejection_mask(d, sequences, level="sequence", high=math.exp(1 / 3) + 1e-9).all()
    assert not corrections.rejection_mask(d, sequences, level="sequence", reduce="sum", high=2.7).any()
    assert corrections.rejection_mask(d, sequences, level="sequence", reduce="max", high=e + 1e-9).all()


def test_off_policy_sequences_are_dropped_only_where_the_advantage_is_negative():
    logp = torch.tensor([-1.0, -1.0, -3.0, -3.0])
    sequences = Sequences(torch.tensor([0, 0, 1, 1]), 2)
    old = torch.tensor([-1.1, -1.1, -1.0, -1.0])
    for advantage, kept in ((-1.0, [True, True, False, False]), (1.0, [True] * 4)):
        got = corrections.off_policy_sequence_mask(logp, old, torch.full((4,), advantage), sequences, threshold=0.5)
        assert got.tolist() == kept


def test_the_two_factors_multiply_to_the_whole():
    logp, engine = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, -1.0])
    old = torch.tensor([-2.0, -1.0, float("nan")])
    factors = corrections.two_factors(old, engine, torch.tensor([True, True, False]))
    known = torch.tensor([True, True, False])
    whole = (logp - factors.old_logp_N + factors.mismatch_N)[known]
    torch.testing.assert_close(whole, (logp - engine)[known])
    assert factors.mismatch_N[2] == 0
