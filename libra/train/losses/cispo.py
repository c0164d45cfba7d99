"""CISPO: log-probabilities weighted by a clipped ratio without gradient, so that every token keeps its gradient.

Shape legend: N tokens, in any arrangement.
"""

from __future__ import annotations

from torch import Tensor

from libra.train.losses.ratio import LOG_RATIO_BOUND, token_ratio


def cispo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p``. CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

    ``clip_low=1`` leaves the ratio unbounded below, as the paper runs it. The paper does not print its upper bound; 5 is
    the weight that TRL and AReaL recommend (their ``epsilon_high=5.0``, ``eps_clip_higher=4.0``).
    """
    return weighted_logp_loss(
        token_ratio(logp_N, old_logp_N, bound=bound), logp_N, advantage_N, clip_low=clip_low, clip_high=clip_high
    )


def weighted_logp_loss(
    ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """CISPO's loss for a ratio of any level."""
    return -ratio_N.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_N * logp_N
