"""GMPO: the geometric mean of a sequence's ratios, each clipped in log space.

Shape legend: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.losses.ratio import LOG_RATIO_BOUND
from libra.train.sequences import Sequences, sequence_mean


def gmpo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    token_eps: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-mean(A) exp(mean(clipped log r))`` of a sequence, at each of its tokens. GMPO, arXiv:2507.20673.

    Aggregated with ``seq-mean-token-mean`` this is the mean over sequences. A token's log ratio is clipped to
    [-clip_low, clip_high] if that makes the objective smaller, as in PPO; the paper's range is (e^-0.4, e^0.4).

    Parameters
    ----------
    token_eps : float, optional
        Added to the token counts of the means (verl: 1e-8); None adds nothing.
    bound : float, optional
        Log ratios are clamped to [-bound, bound] first: for A < 0 nothing else bounds a large one. None: no clamp (verl).
    """
    sign_N = torch.sign(advantage_N)
    log_ratio_N = logp_N - old_logp_N
    if bound is not None:
        log_ratio_N = log_ratio_N.clamp(-bound, bound)
    clipped_N = log_ratio_N.clamp(-clip_low, clip_high)
    pessimistic_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clipped_N)
    ratio_S = sequence_mean(pessimistic_N, sequences, eps=token_eps).exp()
    advantage_S = sequence_mean(advantage_N, sequences, eps=token_eps)
    return sequences.spread(-advantage_S * ratio_S)
