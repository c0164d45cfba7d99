"""DPPO: a token leaves the gradient if its *probability* moved too far, not if its ratio did.

Shape legend: N tokens, in any arrangement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.choice_check import check_option
from libra.train.losses.ratio import LOG_RATIO_BOUND, token_ratio


@torch.no_grad()
def dppo_keep(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    divergence: str = "tv",
) -> Tensor:
    """Whether a token keeps its gradient (N,) bool. DPPO, arXiv:2602.04879.

    Parameters
    ----------
    low, high : float
        Bound of the divergence downwards (for A <= 0) and upwards (for A > 0).
    divergence : {"tv", "kl"}
        Of the two-outcome distribution "this token or another": total variation |p_now - p_old| (prime-rl, verl's
        ``dppo_tv``), or KL(p_old | p_now), which is bounded only in the direction of the advantage (verl's ``dppo_kl``).
    """
    check_option("dppo divergence", divergence, ("tv", "kl"))
    now_N, old_N = logp_N.exp(), old_logp_N.exp()
    if divergence == "tv":
        return torch.where(advantage_N > 0, now_N - old_N <= high, now_N - old_N >= -low)
    other = ((1 - old_N + 1e-8) / (1 - now_N + 1e-8)).log()
    kl_N = old_N * (old_logp_N - logp_N) + (1 - old_N) * other
    return torch.where(advantage_N > 0, (kl_N <= high) | (now_N <= old_N), (kl_N <= low) | (now_N >= old_N))


def dppo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    divergence: str = "tv",
    log_ratio_coef: float = 0.0,
    ratio_max: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-A r`` where `dppo_keep`, plus ``log_ratio_coef * (log r)^2`` at every token (prime-rl: 1e-3).

    Parameters
    ----------
    ratio_max : float, optional
        Truncate the ratio and take the gradient through log p alone, ``-A stop(min(r, ratio_max)) log p`` (verl: 20).
        None: the gradient goes through r (prime-rl).
    """
    keep_N = dppo_keep(logp_N, old_logp_N, advantage_N, low=clip_low, high=clip_high, divergence=divergence)
    ratio_N = token_ratio(logp_N, old_logp_N, bound=bound)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max).detach() * logp_N
    loss_N = torch.where(keep_N, -advantage_N * ratio_N, torch.zeros_like(ratio_N))
    if log_ratio_coef:
        loss_N = loss_N + log_ratio_coef * (logp_N - old_logp_N).square()
    return loss_N
