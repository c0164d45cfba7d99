"""Generalised advantage estimation, for runs with a critic.

Shape legend: B rows, T places of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.advantages.whitening import whiten


def gae(
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whitened: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T). GAE, arXiv:1506.02438; agrees with verl 0.9.1.

    ``mask_BT`` is 0 for observations and padding, which are skipped: the token before an observation uses the value of the token
    after it. With ``whitened`` advantages are whitened over the unmasked tokens; returns never are. Masked places have the values
    of the next token, as in verl. Library only: no run has a critic.
    """
    mask_BT = mask_BT.to(value_BT.dtype)
    advantage_BT = torch.empty_like(value_BT)
    next_value_B = next_advantage_B = torch.zeros_like(value_BT[:, 0]) if value_BT.shape[1] else value_BT.sum(-1)
    for place in reversed(range(value_BT.shape[1])):
        value_B, mask_B = value_BT[:, place], mask_BT[:, place]
        delta_B = reward_BT[:, place] + gamma * next_value_B - value_B
        next_advantage_B = torch.where(mask_B > 0, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B > 0, value_B, next_value_B)
        advantage_BT[:, place] = next_advantage_B
    return_BT = advantage_BT + value_BT
    return (whiten(advantage_BT, mask_BT) if whitened else advantage_BT), return_BT
