from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.train import clipped_policy_loss
from libra.train.policy_loss import clip_sums

triples = st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-3, 3))


def test_agrees_with_verl_gradient_included(golden):
    cases = [(p, a) for p, a in golden("verl_policy_loss_ppo_dual_clip") if p["mode"] == "token-mean"]
    assert len(cases) == 8
    for parameters, arrays in cases:
        mask = arrays["in_response_mask"] > 0
        logp = arrays["in_log_prob"].clone().requires_grad_()
        loss = clipped_policy_loss(
            logp[mask],
            arrays["in_old_log_prob"][mask],
            arrays["in_advantages"][mask],
            clip_low=parameters["clip_low"],
            clip_high=parameters["clip_high"],
            dual_clip=parameters["clip_c"],
        )
        if "in_rollout_is_weights" in arrays:
            loss = loss * arrays["in_rollout_is_weights"][mask]
        mean = loss.sum() / mask.sum()
        mean.backward()
        torch.testing.assert_close(mean.detach(), arrays["out_loss"], rtol=0, atol=1e-9)
        torch.testing.assert_close(logp.grad, arrays["out_grad"], rtol=0, atol=1e-9)


def test_token_mean_is_verls_aggregation(golden):
    cases = [(p, a) for p, a in golden("verl_agg_loss") if p["mode"] == "token-mean"]
    assert len(cases) == 6
    for _, arrays in cases:
        mask = arrays["in_loss_mask"] > 0
        got = arrays["in_loss_mat"][mask].sum() / mask.sum()
        torch.testing.assert_close(got, arrays["out_loss"], rtol=0, atol=1e-9)


def test_clipping_by_hand():
    behaviour = torch.zeros(6, dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 9.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss = clipped_policy_loss(logp, behaviour, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
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
    clipped_policy_loss(logp, behaviour, advantage, dual_clip=3.0).sum().backward()
    step = 1e-6
    high = clipped_policy_loss(start + step, behaviour, advantage, dual_clip=3.0)
    low = clipped_policy_loss(start - step, behaviour, advantage, dual_clip=3.0)
    smooth = kinks > 1e-3
    expected = (high - low) / (2 * step)
    torch.testing.assert_close(logp.grad[smooth], expected[smooth], rtol=1e-5, atol=1e-6)


@given(st.sampled_from([-1e4, -200.0, 200.0, 1e4]), st.sampled_from([-1.0, 0.0, 1.0]))
def test_extreme_log_ratios_stay_finite(log_ratio, advantage):
    logp = torch.tensor([log_ratio], requires_grad=True)
    clipped_policy_loss(logp, torch.zeros(1), torch.tensor([advantage])).sum().backward()
    assert torch.isfinite(logp.grad).all()


def test_no_tokens_give_no_loss():
    none = torch.zeros(0)
    assert clipped_policy_loss(none, none, none).sum() == 0
    assert clip_sums(none, none, none, clip_low=0.2, clip_high=0.2)["ratio_sum"] == 0
