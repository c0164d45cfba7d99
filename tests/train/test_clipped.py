from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.train.losses import clip_sums, ppo_loss

triples = st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-3, 3))


def test_clipping_by_hand():
    behaviour = torch.zeros(6, dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 9.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss = ppo_loss(logp, behaviour, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([-2, -2.56, -1, 3, 1.6, 6], dtype=torch.float64))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-2, 0, -1, 3, 0, 0], dtype=torch.float64))
    sums = clip_sums(logp.detach(), behaviour, advantage, clip_low=0.2, clip_high=0.28)
    assert (sums["clipped_low"], sums["clipped_high"]) == (1, 1)
    assert math.isclose(sums["ratio_max"], 9)
    assert math.isclose(sums["ratio_sum"], 14)


@given(st.lists(triples, min_size=1, max_size=8))
def test_gradient_is_that_of_finite_differences(tokens):
    behaviour, start, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    ratio = (start - behaviour).exp()
    # at a kink the gradient is a choice
    kinks = torch.stack([(ratio - edge).abs() for edge in (0.8, 1.28, 3.0)]).amin(0)
    logp = start.clone().requires_grad_()
    ppo_loss(logp, behaviour, advantage, clip_high=0.28, dual_clip=3.0).sum().backward()
    step = 1e-6
    high = ppo_loss(start + step, behaviour, advantage, clip_high=0.28, dual_clip=3.0)
    low = ppo_loss(start - step, behaviour, advantage, clip_high=0.28, dual_clip=3.0)
    smooth = kinks > 1e-3
    expected = (high - low) / (2 * step)
    torch.testing.assert_close(logp.grad[smooth], expected[smooth], rtol=1e-5, atol=1e-6)


@given(st.sampled_from([-1e4, -200.0, 200.0, 1e4]), st.sampled_from([-1.0, 0.0, 1.0]))
def test_extreme_log_ratios_stay_finite(log_ratio, advantage):
    logp = torch.tensor([log_ratio], requires_grad=True)
    ppo_loss(logp, torch.zeros(1), torch.tensor([advantage])).sum().backward()
    assert torch.isfinite(logp.grad).all()


def test_no_tokens_give_no_loss():
    none = torch.zeros(0)
    assert ppo_loss(none, none, none).sum() == 0
    assert clip_sums(none, none, none, clip_low=0.2, clip_high=0.2)["ratio_sum"] == 0
