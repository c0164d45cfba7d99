"""How token losses become one number: what each mode divides by, in one piece and in slices.

An asynchronous run makes its batches of what is complete, short trajectories first, so that compositions vary. With the mean over
tokens a trajectory's gradient is divided by the tokens of whatever it shares a batch with. With the mean over each sequence's
tokens it is divided by its own: failures of web agents have 12.5 steps on average where successes have 5.1, and their tokens weigh
2.45 times less (AsyncWebRL, arXiv:2606.05597).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import Aggregation, Packed, Padded
from libra.train.aggregation import AGGREGATIONS
from libra.train.samples import sample_of
from libra.train.step_report import Tally

MODES = {
    "token-mean": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"loss_divisor": 64.0},
    "constant": {"loss_divisor": 64.0},
}


def gradient(replica, trajectories) -> torch.Tensor:
    """The divided gradient of one batch, flat."""
    replica.optimizer.zero_grad(set_to_none=True)
    weight = replica.gradient.accumulate([sample_of(made, 0) for made in trajectories], 0, Tally())
    parts = [p.grad.flatten() for p in replica.optimized().values() if p.grad is not None]
    return torch.cat(parts) / replica.gradient.objective.aggregation.divisor_of(weight)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_mean_over_tokens_depends_on_the_company_and_only_a_constant_on_the_size(replica, trajectory, mode):
    short = [trajectory(seed, 1.0, (5, 4)) for seed in (1, 2)]
    long = [trajectory(seed, -0.5, (5, 24)) for seed in (3, 4)]
    made = replica(torch.float64, aggregation=mode, **MODES[mode])
    alike = gradient(made, short) + gradient(made, long)
    mixed = gradient(made, [short[0], long[0]]) + gradient(made, [short[1], long[1]])
    change = float((alike - mixed).norm() / mixed.norm())
    assert change > 0.1 if mode == "token-mean" else change < 1e-12
    one = gradient(made, short[:1]) + gradient(made, short[1:])  # batches of one
    ratio = float(one.norm() / gradient(made, short).norm())
    assert ratio == pytest.approx(1.0 if mode == "constant" else 2.0, rel=1e-9)


@pytest.mark.parametrize(("mode", "less"), list(zip(MODES, (1.0, 125 / 51, 1.0, 1.0), strict=True)))
def test_tokens_of_long_failures_weigh_less_only_by_the_mean_over_each_sequence(mode, less):
    options = {"seq-mean-token-sum-norm": {"horizon_tokens": 64.0}, "constant": {"divisor": 64.0}}.get(mode, {})
    lengths = torch.tensor([51, 125])  # tokens of a success, and of a failure
    loss_N = torch.zeros(int(lengths.sum()), dtype=torch.float64, requires_grad=True)
    Aggregation(mode, **options)(loss_N, Packed(torch.repeat_interleave(torch.arange(2), lengths), 2)).backward()
    assert float(loss_N.grad[0] / loss_N.grad[-1]) == pytest.approx(less)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_weights_of_slices_add_up_exactly_to_those_of_the_minibatch(mode, counts, cut):
    rule = Aggregation(mode, horizon_tokens=4097.0, divisor=0.1)

    def weight(part):
        return rule.weight_sum(num_tokens=sum(part), num_sequences=len(part))

    whole = weight(counts)
    assert weight(counts[:cut]) + weight(counts[cut:]) == whole
    assert rule.divisor_of(whole) == rule.denominator(num_tokens=sum(counts), num_sequences=len(counts))


def test_empty_rows_count_only_where_asked():
    rows = Padded(torch.tensor([[1, 1], [0, 0]]))
    loss = torch.tensor([[2.0, 4.0], [float("nan"), float("inf")]])
    assert float(Aggregation("seq-mean-token-mean")(loss, rows)) == 3
    assert float(Aggregation("seq-mean-token-mean", count_empty=True)(loss, rows)) == 1.5


@pytest.mark.parametrize("mode", ["mean", "seq-mean-token-sum-norm"])
def test_a_mode_that_does_not_exist_or_lacks_its_number_is_refused(mode):
    with pytest.raises(TrainError):
        Aggregation(mode)
