"""What every loss promises: indifference to order and padding, right gradients, finite numbers at the extremes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import Aggregation, Packed, Padded, kl_estimate
from libra.train.aggregation import AGGREGATIONS
from libra.train.kl import KL_ESTIMATORS
from libra.train.losses import (
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
    value_loss,
    vespo_loss,
)

LOSSES = {
    "ppo": lambda logp, old, a, s: ppo_loss(logp, old, a),
    "ppo_dual": lambda logp, old, a, s: ppo_loss(logp, old, a, dual_clip=3.0, ratio_max=4.0),
    "gspo": lambda logp, old, a, s: gspo_loss(logp, old, a, s, clip_low=0.2, clip_high=0.3),
    "gspo_sequence": lambda logp, old, a, s: gspo_loss(
        logp, old, a, s, clip_low=0.2, clip_high=0.3, gradient="sequence", mean_advantage=True
    ),
    "cispo": lambda logp, old, a, s: cispo_loss(logp, old, a),
    "sapo": lambda logp, old, a, s: sapo_loss(logp, old, a),
    "gmpo": gmpo_loss,
    "dppo": lambda logp, old, a, s: dppo_loss(logp, old, a, log_ratio_coef=0.1),
    "dppo_kl": lambda logp, old, a, s: dppo_loss(logp, old, a, divergence="kl", ratio_max=5.0),
    "reinforce": lambda logp, old, a, s: reinforce_loss(logp, a),
    "vespo": vespo_loss,
}
MODES = {
    **{mode: Aggregation(mode) for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")},
    "seq-mean-token-sum-norm": Aggregation("seq-mean-token-sum-norm", horizon_tokens=9.0),
    "constant": Aggregation("constant", divisor=11.0),
}
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**32 - 1)


def draw(lengths: list[int], seed: int) -> tuple[list[torch.Tensor], Packed]:
    """Log-probabilities now and old, advantages (N,), and the sequences."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logp = torch.as_tensor(rng.uniform(-5, -0.1, count))
    old = torch.as_tensor(logp.numpy() + rng.normal(0, 0.3, count))
    advantage = torch.as_tensor(np.repeat(rng.normal(size=len(lengths)), lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(lengths))
    return [logp, old, advantage], Packed(sequence, len(lengths))


def as_rows(columns: list[torch.Tensor], lengths: list[int], extra: int, filler: float) -> tuple[list, Padded]:
    """The same tokens as padded rows, with garbage in ``extra`` more places of each row."""
    width = max(lengths) + extra
    mask = torch.arange(width)[None] < torch.as_tensor(lengths)[:, None]
    rows = []
    for column in columns:
        row = torch.full((len(lengths), width), filler, dtype=torch.float64)
        row[mask] = column
        rows.append(row)
    return rows, Padded(mask)


def total(name: str, columns: list[torch.Tensor], sequences, aggregation: Aggregation) -> tuple[float, torch.Tensor]:
    logp = columns[0].clone().requires_grad_()
    loss = aggregation(LOSSES[name](logp, *columns[1:], sequences), sequences)
    loss.backward()
    return float(loss.detach()), logp.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)  # of each of 55 combinations
@given(lengths, seeds, st.integers(0, 3), st.sampled_from([0.0, -7.0, 3.0]))
def test_packed_and_padded_agree_whatever_the_padding_holds(name, mode, lengths, seed, extra, filler):
    columns, packed = draw(lengths, seed)
    rows, padded = as_rows(columns, lengths, extra, filler)
    loss, grad = total(name, columns, packed, MODES[mode])
    row_loss, row_grad = total(name, rows, padded, MODES[mode])
    assert row_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(row_grad[padded.mask_N], grad, rtol=1e-9, atol=1e-9)
    assert (row_grad[~padded.mask_N] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(lengths, seeds, st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_nothing(name, mode, lengths, seed, random):
    columns, packed = draw(lengths, seed)
    order = list(range(len(lengths)))
    random.shuffle(order)
    places = torch.cat([torch.nonzero(packed.sequence == number)[:, 0] for number in order])
    moved = Packed(
        torch.repeat_interleave(torch.arange(len(order)), torch.as_tensor([lengths[n] for n in order])), len(order)
    )
    loss, grad = total(name, columns, packed, MODES[mode])
    moved_loss, moved_grad = total(name, [column[places] for column in columns], moved, MODES[mode])
    assert moved_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(moved_grad, grad[places], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(lengths, seeds, st.integers(1, 4))
def test_a_split_into_whole_sequences_sums_to_the_whole(name, mode, lengths, seed, cut):
    columns, packed = draw(lengths, seed)
    denominator = MODES[mode].denominator(num_tokens=sum(lengths), num_sequences=len(lengths))
    whole = float(MODES[mode](LOSSES[name](*columns, packed), packed))
    parts = 0.0
    for start in range(0, len(lengths), cut):
        inside = (packed.sequence >= start) & (packed.sequence < start + cut)
        sequences = Packed(packed.sequence[inside] - start, min(cut, len(lengths) - start))
        loss = LOSSES[name](*(column[inside] for column in columns), sequences)
        parts += float(MODES[mode].weighted_sum(loss, sequences)) / denominator
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)


SURROGATES = ("ppo", "ppo_dual", "gspo_sequence", "sapo", "gmpo", "reinforce")
"""Losses whose gradient is that of their value; the others stop it somewhere on purpose."""


@pytest.mark.parametrize("name", SURROGATES)
@given(lengths, seeds)
def test_gradients_are_those_of_finite_differences(name, lengths, seed):
    columns, packed = draw(lengths, seed)
    aggregation = Aggregation("seq-mean-token-mean")
    _, grad = total(name, columns, packed, aggregation)
    step = 1e-6
    for place in range(len(grad)):
        values = []
        for sign in (1, -1):
            moved = columns[0].clone()
            moved[place] += sign * step
            values.append(float(aggregation(LOSSES[name](moved, *columns[1:], packed), packed)))
        slopes = (values[0] - values[1]) / (2 * step)
        middle = float(aggregation(LOSSES[name](*columns, packed), packed))
        bend = abs(values[0] + values[1] - 2 * middle) / step
        if bend < 1e-4:  # not within a step of a clip's edge, where the gradient is a choice
            assert float(grad[place]) == pytest.approx(slopes, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo_sequence", "cispo", "sapo", "gmpo", "reinforce"])
@given(lengths, seeds)
def test_where_nothing_has_moved_all_gradients_are_the_plain_policy_gradient(name, lengths, seed):
    columns, packed = draw(lengths, seed)
    columns[1] = columns[0].clone()
    aggregation = Aggregation("seq-mean-token-mean")
    _, grad = total(name, columns, packed, aggregation)
    _, plain = total("reinforce", columns, packed, aggregation)
    torch.testing.assert_close(grad, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce", "vespo"])
@given(lengths, seeds, st.floats(0.01, 100))
def test_the_loss_scales_with_the_advantage(name, lengths, seed, factor):
    columns, packed = draw(lengths, seed)
    loss, grad = total(name, columns, packed, Aggregation())
    scaled, scaled_grad = total(name, [columns[0], columns[1], columns[2] * factor], packed, Aggregation())
    assert scaled == pytest.approx(factor * loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(scaled_grad, factor * grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@given(st.sampled_from([-1e4, -200.0, -30.0, 0.0, 30.0, 200.0, 1e4]), st.sampled_from([-1.0, 0.0, 1.0]))
def test_extreme_log_ratios_stay_finite_in_float32(name, log_ratio, advantage):
    logp = torch.full((3,), min(0.0, log_ratio), requires_grad=True)
    old = torch.full((3,), min(0.0, -log_ratio))
    sequences = Packed(torch.zeros(3, dtype=torch.int64), 1)
    loss = Aggregation()(LOSSES[name](logp, old, torch.full((3,), advantage), sequences), sequences)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_and_empty_masks_give_zero_and_no_nan(name, mode):
    for sequences, shape in ((Packed(torch.zeros(0, dtype=torch.int64), 0), (0,)), (Padded(torch.zeros(2, 3)), (2, 3))):
        logp = torch.full(shape, float("nan")) if len(shape) > 1 else torch.zeros(shape)
        logp = logp.nan_to_num(-1.0).requires_grad_()
        loss = MODES[mode](LOSSES[name](logp, logp.detach(), torch.ones(shape), sequences), sequences)
        loss.backward()
        assert float(loss.detach()) == 0
        assert (logp.grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_of_one_token_is_its_token(name):
    columns, packed = draw([1], 3)
    loss, grad = total(name, columns, packed, Aggregation("seq-mean-token-mean"))
    token, token_grad = total(name, columns, packed, Aggregation("token-mean"))
    assert loss == token
    assert torch.equal(grad, token_grad)


def test_empty_rows_count_only_where_asked():
    rows = Padded(torch.tensor([[1, 1], [0, 0]]))
    loss = torch.tensor([[2.0, 4.0], [float("nan"), float("inf")]])
    assert float(Aggregation("seq-mean-token-mean")(loss, rows)) == 3
    assert float(Aggregation("seq-mean-token-mean", count_empty=True)(loss, rows)) == 1.5


def test_aggregation_options_are_checked():
    with pytest.raises(TrainError, match="aggregation: got 'mean'; allowed are token-mean, "):
        Aggregation("mean")
    with pytest.raises(TrainError, match="horizon_tokens is None; allowed is a number above 0"):
        Aggregation("seq-mean-token-sum-norm")
    assert set(MODES) == set(AGGREGATIONS)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_kl_estimators_are_bounded_and_have_the_stated_gradient(estimator, logp, reference):
    one = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([reference], dtype=torch.float64)
    bounded = kl_estimate(one, other, estimator, bound=5.0, log_ratio_bound=10.0)
    assert abs(float(bounded.detach())) <= 5
    kl_estimate(one, other, estimator).sum().backward()
    difference = logp - reference
    expected = {
        "k1": 1.0,
        "abs": float(np.sign(difference)),
        "k2": difference,
        "k3": 1 - float(np.exp(-difference)),
    }[estimator.removesuffix("+")]
    assert float(one.grad) == pytest.approx(difference if estimator.endswith("+") else expected, rel=1e-9, abs=1e-9)


def test_the_mean_of_k1_k3_is_the_divergence_and_the_gradient_of_k2_is_its_gradient():
    logits = torch.tensor([0.3, -0.5, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    divergence = (logp.exp() * (logp - q.log())).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for name in ("k1", "k3"):
        mean = (logp.detach().exp() * kl_estimate(logp, q.log(), name)).sum()
        torch.testing.assert_close(mean, divergence)
    for name in ("k2", "k3+", "k1+"):
        mean = (logp.detach().exp() * kl_estimate(logp, q.log(), name)).sum()
        (got,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(got, exact)


def test_value_loss_by_hand():
    value, old, target = (torch.tensor([x], dtype=torch.float64) for x in (2.0, 0.0, 3.0))
    assert float(value_loss(value, old, target, clip=0.5)) == 0.5 * 2.5**2
    assert float(value_loss(value, old, target, clip=None)) == 0.5
