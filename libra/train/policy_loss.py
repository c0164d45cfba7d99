"""The clipped policy-gradient loss, token by token, and what it did to the tokens.

Shape legend: N action tokens, in any arrangement; every argument and result is elementwise.

The loss of a minibatch is the sum over its tokens divided by their number, whatever rows, micro-batches or replicas
they lie on (token-mean, DAPO arXiv:2503.14476): callers sum `clipped_policy_loss` and divide by the whole count.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Largest |log ratio| exponentiated (verl's value): e^20 is finite in float32, e^89 is not. Beyond it, gradient 0."""


def clipped_policy_loss(
    logp_N: Tensor,
    behaviour_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's pessimistic surrogate with separate bounds: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``.

    PPO (arXiv:1707.06347); clip-higher from DAPO (arXiv:2503.14476); dual clip from arXiv:1912.09729.

    Parameters
    ----------
    logp_N : Tensor
        Log-probability now, the only argument with a gradient (nats).
    behaviour_logp_N : Tensor
        Log-probability of the policy that sampled the token (nats).
    advantage_N : Tensor
    clip_low, clip_high : float
        Ratios below ``1 - clip_low`` (for A < 0) or above ``1 + clip_high`` (for A > 0) get no gradient.
    dual_clip : float, optional
        For A < 0 the loss is at most ``-A * dual_clip`` (> 1). None: not bounded.
    """
    ratio_N = (logp_N - behaviour_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * ratio_N.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss_N
    return torch.where(advantage_N < 0, torch.minimum(-advantage_N * dual_clip, loss_N), loss_N)


@torch.no_grad()
def clip_sums(
    logp_N: Tensor, behaviour_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, float]:
    """Sums that become the means of a report (ratio, clipped tokens, k3 from behaviour), and the largest ratio."""
    log_ratio_N = (logp_N - behaviour_logp_N).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = log_ratio_N.exp()
    return {
        "ratio_sum": float(ratio_N.sum()),
        "ratio_max": float(ratio_N.max()) if ratio_N.numel() else 0.0,
        "clipped_low": float(((advantage_N < 0) & (ratio_N < 1 - clip_low)).sum()),
        "clipped_high": float(((advantage_N > 0) & (ratio_N > 1 + clip_high)).sum()),
        "kl_sum": float((ratio_N - 1 - log_ratio_N).sum()),
    }
