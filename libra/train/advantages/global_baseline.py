"""REINFORCE++: returns whitened over the tokens of the whole batch.

Shape legend: B rows, T places of a row, S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.advantages.group_relative import grpo
from libra.train.advantages.whitening import whiten


def reinforce_pp(reward_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of REINFORCE++, arXiv:2501.03262, with dense or outcome rewards; agrees with verl 0.9.1.

    Masked places (observations, padding) are skipped: they have return 0, their rewards are ignored, and the discount does
    not apply to them.
    """
    mask_BT = mask_BT.to(reward_BT.dtype)
    return_BT = torch.zeros_like(reward_BT)
    running_B = reward_BT.new_zeros(len(reward_BT))
    for place in reversed(range(reward_BT.shape[1])):
        mask_B = mask_BT[:, place]
        running_B = torch.where(mask_B > 0, reward_BT[:, place] + gamma * running_B, running_B)
        return_BT[:, place] = running_B * mask_B
    return whiten(return_BT, mask_BT) * mask_BT, return_BT


def reinforce_pp_outcome(reward_S: Tensor, length_S: Tensor) -> Tensor:
    """`reinforce_pp` with gamma 1 and one reward per sample (S,): every token of a sample has the same advantage.

    ``length_S`` are the tokens of each sample, which the whitening counts; 0 leaves a sample out of it.
    """
    return whiten(reward_S, length_S)


def reinforce_pp_baseline(
    reward_S: Tensor, length_S: Tensor, group_S: Tensor, *, valid_S: Tensor | None = None
) -> Tensor:
    """Reward minus the mean of its group, whitened over the tokens of the batch (S,). REINFORCE++-baseline; as in verl 0.9.1.

    ``length_S`` are the tokens of each sample. The only sample of a group keeps its reward before whitening.
    """
    centred_S = grpo(reward_S, group_S, valid_S=valid_S, normalize_std=False)
    weight_S = length_S if valid_S is None else torch.where(valid_S, length_S, torch.zeros_like(length_S))
    whitened_S = whiten(centred_S, weight_S)
    return whitened_S if valid_S is None else torch.where(valid_S, whitened_S, torch.zeros_like(whitened_S))
