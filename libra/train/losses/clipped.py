"""PPO's clipped surrogate, token by token, and the statistics of its clips.

Shape legend: N action tokens, in any arrangement; every argument and result is elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.losses.ratio import LOG_RATIO_BOUND, token_ratio


def clipped_surrogate(
    ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
) -> Tensor:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` for a ratio of any level, with gradient through the ratio.

    Parameters
    ----------
    clip_low, clip_high : float
        Ratios below ``1 - clip_low`` (for A < 0) or above ``1 + clip_high`` (for A > 0) get no gradient.
    dual_clip : float, optional
        For A < 0 the loss is at most ``-A * dual_clip`` (> 1), arXiv:1912.09729. None: not bounded.
    ratio_max : float, optional
        The unclipped ratio is at most this, for both signs (two-sided GRPO, INTELLECT-2 arXiv:2505.07291; TRL's delta).
    """
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max)
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)
    if dual_clip is None:
        return loss_N
    return torch.where(advantage_N < 0, torch.minimum(-advantage_N * dual_clip, loss_N), loss_N)


def ppo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """PPO's pessimistic surrogate with separate bounds: PPO (arXiv:1707.06347), clip-higher from DAPO (arXiv:2503.14476).

    ``old_logp_N`` is the log-probability in the denominator of the ratio. See `clipped_surrogate` for the clips and
    `libra.train.losses.ratio.token_ratio` for ``bound``.
    """
    return clipped_surrogate(
        token_ratio(logp_N, old_logp_N, bound=bound),
        advantage_N,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_max=ratio_max,
    )


@torch.no_grad()
def clip_sums(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, float]:
    """Sums that become the means of a report (ratio, clipped tokens, k3 from the old policy), and the largest ratio."""
    log_ratio_N = (logp_N - old_logp_N).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = log_ratio_N.exp()
    return {
        "ratio_sum": float(ratio_N.sum()),
        "ratio_max": float(ratio_N.max()) if ratio_N.numel() else 0.0,
        "clipped_low": float(((advantage_N < 0) & (ratio_N < 1 - clip_low)).sum()),
        "clipped_high": float(((advantage_N > 0) & (ratio_N > 1 + clip_high)).sum()),
        "kl_sum": float((ratio_N - 1 - log_ratio_N).sum()),
    }
