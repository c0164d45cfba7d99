import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import Aggregation
from libra.train.losses import AGGREGATIONS
from libra.train.samples import sample_of
from libra.train.step_report import Tally

DIVISOR = {"loss_divisor": 64.0}
MODES = {"token-mean": {}, "seq-mean-token-mean": {}, "seq-mean-token-sum-norm": DIVISOR}


def gradient(replica, trajectories):
    """The divided gradient of one batch, flat."""
    replica.optimizer.zero_grad(set_to_none=True)
    weight = replica.gradient.accumulate([sample_of(made, 0) for made in trajectories], 0, Tally())
    parts = [p.grad.flatten() for p in replica.optimized().values() if p.grad is not None]
    return torch.cat(parts) / replica.gradient.objective.aggregation.divisor_of(weight)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_mean_over_tokens_depends_on_the_company(replica, trajectory, mode):
    short = [trajectory(seed, 1.0, (5, 4)) for seed in (1, 2)]
    long = [trajectory(seed, -0.5, (5, 24)) for seed in (3, 4)]
    made = replica(torch.float64, aggregation=mode, **MODES[mode])
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
