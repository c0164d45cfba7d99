"""SAPO: a smooth gate instead of a clip.

Shape legend: N tokens, in any arrangement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.losses.ratio import LOG_RATIO_BOUND, token_ratio


def gated_surrogate(
    ratio_N: Tensor, advantage_N: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """``-A (4 / tau) sigmoid(tau (r - 1))`` with tau by the sign of A (A = 0 counts as negative), for any level of ratio."""
    positive, negative = (torch.as_tensor(tau, dtype=ratio_N.dtype) for tau in (tau_positive, tau_negative))
    tau_N = torch.where(advantage_N > 0, positive, negative)
    return -(torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N) * advantage_N


def sapo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """Loss of each token; aggregate with ``seq-mean-token-mean``. SAPO, arXiv:2511.20347, with the paper's temperatures.

    The gradient at r = 1 is PPO's; it decays as r moves away from 1, faster for a higher temperature ``tau``.
    """
    return gated_surrogate(
        token_ratio(logp_N, old_logp_N, bound=bound),
        advantage_N,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
    )
