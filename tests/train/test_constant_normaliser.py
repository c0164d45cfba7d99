"""What a constant normaliser changes (Dr. GRPO; AsyncWebRL): the weight of a trajectory no longer depends on its batch.

An asynchronous run makes its batches of what is complete, short trajectories first, so that compositions vary. With the mean over
tokens a trajectory's gradient is divided by the tokens of whatever it shares a batch with. With the mean over each sequence's
tokens it is divided by its own: failures of web agents have 12.5 steps on average where successes have 5.1, and their tokens weigh
2.45 times less (AsyncWebRL, arXiv:2606.05597).
"""

from __future__ import annotations

import pytest
import torch

from libra.train.aggregation import Aggregation
from libra.train.samples import sample_of
from libra.train.sequences import Packed
from libra.train.slice_gradient import SliceGradient
from libra.train.step_report import Tally

SHORT, LONG = (5, 4), (5, 24)
MODES = {
    "token-mean": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"loss_divisor": 64.0},
    "constant": {"loss_divisor": 64.0},
}


def gradient(replica, trajectories) -> torch.Tensor:
    """The divided gradient of one batch, flat."""
    computing: SliceGradient = replica.gradient
    samples = [sample_of(made, 0) for made in trajectories]
    replica.optimizer.zero_grad(set_to_none=True)
    weight = computing.accumulate(samples, 0, Tally())
    parts = [p.grad.flatten() for p in replica.optimized().values() if p.grad is not None]
    return torch.cat(parts) / computing.objective.aggregation.divisor_of(weight)


@pytest.fixture
def batches(trajectory):
    """Two short and two long trajectories, in batches of two: alike together, and mixed."""
    short = [trajectory(seed, 1.0, SHORT) for seed in (1, 2)]
    long = [trajectory(seed, -0.5, LONG) for seed in (3, 4)]
    return (short, long), ([short[0], long[0]], [short[1], long[1]])


@pytest.mark.parametrize(("mode", "depends"), list(zip(MODES, (True, False, False, False), strict=True)))
def test_only_the_mean_over_tokens_depends_on_the_composition_of_batches(replica, batches, mode, depends) -> None:
    made = replica(torch.float64, aggregation=mode, **MODES[mode])
    alike, mixed = (sum(gradient(made, batch) for batch in composition) for composition in batches)
    change = float((alike - mixed).norm() / mixed.norm())
    assert change > 0.1 if depends else change < 1e-12


def test_a_trajectory_beside_a_long_one_weighs_less_by_the_mean_over_tokens_only(replica, batches) -> None:
    (short, long), _ = batches
    for made in long:
        made.advantage = 0.0  # so that only the short one has a gradient
    scale = {}
    for mode, options in MODES.items():
        made = replica(torch.float64, aggregation=mode, **options)
        beside_long, beside_short = (
            gradient(made, [short[0], long[0]]),
            gradient(made, [short[0], _without_signal(short[1])]),
        )
        scale[mode] = float(beside_long.norm() / beside_short.norm())
    assert scale["token-mean"] == pytest.approx((4 + 4) / (4 + 24))
    assert [scale[mode] for mode in list(MODES)[1:]] == pytest.approx([1.0, 1.0, 1.0])


def _without_signal(made):
    made.advantage = 0.0
    return made


def test_a_batch_of_fewer_trajectories_takes_a_smaller_step_only_with_a_constant(replica, batches) -> None:
    (short, _), _ = batches
    for mode, options in MODES.items():
        made = replica(torch.float64, aggregation=mode, **options)
        both, one = gradient(made, short), gradient(made, short[:1]) + gradient(made, short[1:])
        ratio = float(one.norm() / both.norm())
        assert ratio == pytest.approx(1.0 if mode == "constant" else 2.0, rel=1e-9), mode


@pytest.mark.parametrize(("mode", "less"), list(zip(MODES, (1.0, 125 / 51, 1.0, 1.0), strict=True)))
def test_tokens_of_long_failures_weigh_less_only_by_the_mean_over_each_sequence(mode, less) -> None:
    options = (
        {"horizon_tokens": 64.0}
        if mode == "seq-mean-token-sum-norm"
        else {"divisor": 64.0}
        if mode == "constant"
        else {}
    )
    lengths = torch.tensor([51, 125])  # tokens of a success, and of a failure
    loss_N = torch.zeros(int(lengths.sum()), dtype=torch.float64, requires_grad=True)
    Aggregation(mode, **options)(loss_N, Packed(torch.repeat_interleave(torch.arange(2), lengths), 2)).backward()
    assert float(loss_N.grad[0] / loss_N.grad[-1]) == pytest.approx(less)
