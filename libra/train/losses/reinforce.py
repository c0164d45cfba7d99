"""The plain policy gradient, and VESPO's reweighting of it.

Shape legend: N tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from libra.train.losses.ratio import LOG_RATIO_BOUND
from libra.train.sequences import Sequences


def reinforce_loss(logp_N: Tensor, advantage_N: Tensor, *, weight_N: Tensor | None = None) -> Tensor:
    """``-A log p``, times a weight without gradient if one is given (Williams 1992; verl's ``gpg`` and ``reinforce``).

    Unbiased only on samples of the current policy, or with importance weights.
    """
    loss_N = -advantage_N * logp_N
    return loss_N if weight_N is None else loss_N * weight_N.detach()


def vespo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    weight_N: Tensor | None = None,
) -> Tensor:
    """``-phi(w) A log p`` with ``phi(w) = e^lambda w^k e^(-lambda w)``, w the whole sequence's ratio. VESPO, arXiv:2602.10693.

    Conventions of TRL 1.16 (``loss_type="vespo"``): token log ratios clamped to +-20, the sequence's logarithm to
    [log 1e-8, 20], A >= 0 counts as positive, phi without gradient.

    Parameters
    ----------
    weight_N : Tensor, optional
        Importance weights of engine against trainer; they enter w (TRL sums their logarithms over every place of a row).
    """
    floor = math.log(1e-8)
    with torch.no_grad():
        log_w_S = sequences.sum((logp_N - old_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        if weight_N is not None:
            log_w_S = log_w_S + sequences.sum(weight_N.log().clamp(floor, LOG_RATIO_BOUND))
        log_w_N = sequences.spread(log_w_S.clamp(floor, LOG_RATIO_BOUND))
        positive_N = advantage_N >= 0
        k_N = torch.where(positive_N, k_positive, k_negative).to(logp_N.dtype)
        lambda_N = torch.where(positive_N, lambda_positive, lambda_negative).to(logp_N.dtype).clamp(min=1e-4)
        phi_N = (lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()).exp()
    return reinforce_loss(logp_N, advantage_N, weight_N=phi_N)
