import numpy as np
import pytest
import torch
from golden.peers import Padded, aggregated
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import Aggregation, Sequences, kl_estimate, losses
from libra.train.losses import AGGREGATIONS, KL_ESTIMATORS
from libra.train.samples import sample_of
from libra.train.step_report import Tally

LOSSES = {
    "ppo": lambda logp, old, a, s: losses.ppo_loss(logp, old, a),
    "ppo_dual": lambda logp, old, a, s: losses.ppo_loss(logp, old, a, dual_clip=3.0, ratio_max=4.0),
    "gspo": lambda logp, old, a, s: losses.gspo_loss(logp, old, a, s, clip_low=0.2, clip_high=0.3),
    "gspo_sequence": lambda logp, old, a, s: losses.gspo_loss(
        logp, old, a, s, clip_low=0.2, clip_high=0.3, gradient="sequence"
    ),
    "cispo": lambda logp, old, a, s: losses.cispo_loss(logp, old, a),
    "sapo": lambda logp, old, a, s: losses.sapo_loss(logp, old, a),
    "gmpo": losses.gmpo_loss,
    "dppo": lambda logp, old, a, s: losses.dppo_loss(logp, old, a, log_ratio_coef=0.1),
    "dppo_kl": lambda logp, old, a, s: losses.dppo_loss(logp, old, a, divergence="kl", ratio_max=5.0),
    "reinforce": lambda logp, old, a, s: losses.reinforce_loss(logp, a),
    "vespo": losses.vespo_loss,
}
MODES = {
    **{mode: Aggregation(mode) for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")},
    "seq-mean-token-sum-norm": Aggregation("seq-mean-token-sum-norm", horizon_tokens=9.0),
    "constant": Aggregation("constant", divisor=11.0),
}
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**32 - 1)
SURROGATES = ("ppo", "ppo_dual", "gspo_sequence", "sapo", "gmpo", "reinforce")
"""Losses whose gradient is that of their value; the others stop it somewhere on purpose."""
DIVISOR = {"loss_divisor": 64.0}
DIVIDED = {"token-mean": {}, "seq-mean-token-mean": {}, "seq-mean-token-sum-norm": DIVISOR}


def draw(lengths, seed):
    """Log-probabilities now and old, advantages (N,), and the sequences."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logp = torch.as_tensor(rng.uniform(-5, -0.1, count))
    old = torch.as_tensor(logp.numpy() + rng.normal(0, 0.3, count))
    advantage = torch.as_tensor(np.repeat(rng.normal(size=len(lengths)), lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(lengths))
    return [logp, old, advantage], Sequences(sequence, len(lengths))


def as_rows(columns, lengths, extra, filler):
    """The same tokens as padded rows, with garbage in ``extra`` more places of each row."""
    width = max(lengths) + extra
    mask = torch.arange(width)[None] < torch.as_tensor(lengths)[:, None]
    rows = []
    for column in columns:
        row = torch.full((len(lengths), width), filler, dtype=torch.float64)
        row[mask] = column
        rows.append(row)
    return rows, Padded(mask)


def total(name, columns, sequences, aggregation):
    logp = columns[0].clone().requires_grad_()
    loss = aggregated(aggregation, LOSSES[name](logp, *columns[1:], sequences), sequences)
    loss.backward()
    return float(loss.detach()), logp.grad


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=5)  # each in five modes
@given(lengths, seeds, st.sampled_from([0.0, -7.0, 3.0]), st.integers(1, 4), st.randoms(use_true_random=False))
def test_padding_order_and_cuts_into_whole_sequences_change_nothing(name, lengths, seed, filler, cut, random):
    columns, packed = draw(lengths, seed)
    rows, padded = as_rows(columns, lengths, seed % 4, filler)
    order = random.sample(range(len(lengths)), len(lengths))
    places = torch.cat([torch.nonzero(packed.sequence == number)[:, 0] for number in order])
    sizes = torch.as_tensor([lengths[n] for n in order])
    moved = Sequences(torch.repeat_interleave(torch.arange(len(order)), sizes), len(order))
    for aggregation in MODES.values():
        loss, grad = total(name, columns, packed, aggregation)
        row_loss, row_grad = total(name, rows, padded, aggregation)
        assert row_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(row_grad[padded.mask_N], grad, rtol=1e-9, atol=1e-9)
        assert (row_grad[~padded.mask_N] == 0).all()
        moved_loss, moved_grad = total(name, [column[places] for column in columns], moved, aggregation)
        assert moved_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(moved_grad, grad[places], rtol=1e-9, atol=1e-9)
        weight = aggregation.weight_sum(num_tokens=sum(lengths), num_sequences=len(lengths))
        parts = 0.0
        for start in range(0, len(lengths), cut):
            inside = (packed.sequence >= start) & (packed.sequence < start + cut)
            sequences = Sequences(packed.sequence[inside] - start, min(cut, len(lengths) - start))
            part = LOSSES[name](*(column[inside] for column in columns), sequences)
            parts += float(aggregation.weighted_sum(part, sequences)) / aggregation.divisor_of(weight)
        assert parts == pytest.approx(loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=8)
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
            values.append(float(aggregated(aggregation, LOSSES[name](moved, *columns[1:], packed), packed)))
        slopes = (values[0] - values[1]) / (2 * step)
        middle = float(aggregated(aggregation, LOSSES[name](*columns, packed), packed))
        bend = abs(values[0] + values[1] - 2 * middle) / step
        if bend < 1e-4:  # not within a step of a clip's edge, where the gradient is a choice
            assert float(grad[place]) == pytest.approx(slopes, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo_sequence", "cispo", "sapo", "gmpo"])
@settings(max_examples=8)
@given(lengths, seeds)
def test_where_nothing_has_moved_all_gradients_are_the_plain_policy_gradient(name, lengths, seed):
    columns, packed = draw(lengths, seed)
    columns[1] = columns[0].clone()
    aggregation = Aggregation("seq-mean-token-mean")
    _, grad = total(name, columns, packed, aggregation)
    _, plain = total("reinforce", columns, packed, aggregation)
    torch.testing.assert_close(grad, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite_in_float32(name, log_ratio, advantage):
    logp = torch.full((3,), min(0.0, log_ratio), requires_grad=True)
    old = torch.full((3,), min(0.0, -log_ratio))
    sequences = Sequences(torch.zeros(3, dtype=torch.int64), 1)
    loss = aggregated(Aggregation(), LOSSES[name](logp, old, torch.full((3,), advantage), sequences), sequences)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_and_empty_masks_give_zero_and_no_nan(name):
    for rows, shape in ((Sequences(torch.zeros(0, dtype=torch.int64), 0), (0,)), (Padded(torch.zeros(2, 3)), (2, 3))):
        for aggregation in MODES.values():
            logp = torch.full(shape, -1.0, requires_grad=True)
            loss = aggregated(aggregation, LOSSES[name](logp, logp.detach(), torch.ones(shape), rows), rows)
            loss.backward()
            assert float(loss.detach()) == 0
            assert (logp.grad == 0).all()


def test_clipping_by_hand():
    behaviour = torch.zeros(6, dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 9.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss = losses.ppo_loss(logp, behaviour, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([-2, -2.56, -1, 3, 1.6, 6], dtype=torch.float64))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-2, 0, -1, 3, 0, 0], dtype=torch.float64))
    sums = losses.clip_sums(logp.detach(), behaviour, advantage, clip_low=0.2, clip_high=0.28)
    found = [float(sums[name]) for name in ("clipped_low", "clipped_high", "ratio_max", "ratio_sum")]
    assert found == pytest.approx([1, 1, 9, 14])
    none = torch.zeros(0)
    assert losses.clip_sums(none, none, none, clip_low=0.2, clip_high=0.2)["ratio_sum"] == 0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_kl_estimators_are_bounded_and_have_the_stated_gradient(estimator, logp, reference):
    one = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([reference], dtype=torch.float64)
    assert abs(float(kl_estimate(one, other, estimator, bound=5.0).detach())) <= 5
    kl_estimate(one, other, estimator).sum().backward()
    difference = logp - reference
    expected = {"k1": 1.0, "abs": float(np.sign(difference)), "k2": difference, "k3": 1 - float(np.exp(-difference))}[
        estimator.removesuffix("+")
    ]
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


def gradient(replica, trajectories):
    replica.optimizer.zero_grad(set_to_none=True)
    weight = replica.gradient.accumulate([sample_of(made, 0) for made in trajectories], 0, Tally())
    parts = [p.grad.flatten() for p in replica.optimized().values() if p.grad is not None]
    return torch.cat(parts) / replica.gradient.objective.aggregation.divisor_of(weight)


@pytest.mark.parametrize("mode", DIVIDED)
def test_only_the_mean_over_tokens_depends_on_the_company(replica, trajectory, mode):
    short = [trajectory(seed, 1.0, (5, 4)) for seed in (1, 2)]
    long = [trajectory(seed, -0.5, (5, 24)) for seed in (3, 4)]
    made = replica(torch.float64, aggregation=mode, **DIVIDED[mode])
    alike = gradient(made, short) + gradient(made, long)
    mixed = gradient(made, [short[0], long[0]]) + gradient(made, [short[1], long[1]])
    change = float((alike - mixed).norm() / mixed.norm())
    assert change > 0.1 if mode == "token-mean" else change < 1e-12
    one = gradient(made, short[:1]) + gradient(made, short[1:])  # batches of one
    assert float(one.norm() / gradient(made, short).norm()) == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_weights_of_slices_add_up_exactly_to_those_of_the_minibatch(mode, counts, cut):
    rule = Aggregation(mode, horizon_tokens=4097.0, divisor=0.1)

    def weight(part):
        return rule.weight_sum(num_tokens=sum(part), num_sequences=len(part))

    whole = weight(counts)
    assert weight(counts[:cut]) + weight(counts[cut:]) == whole


@pytest.mark.parametrize("mode", ["mean", "seq-mean-token-sum-norm"])
def test_a_mode_that_does_not_exist_or_lacks_its_number_is_refused(mode):
    with pytest.raises(TrainError):
        Aggregation(mode)
