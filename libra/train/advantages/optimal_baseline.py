"""OPO: the baseline that minimises the variance of the gradient, if a sequence's gradient grows with its length.

Shape legend: S samples of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from libra.train.advantages.groups import Groups


def opo(
    reward_S: Tensor,
    length_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    singleton: Literal["reward", "zero"] = "reward",
) -> Tensor:
    """Reward minus the length-weighted mean reward of the group (S,). OPO, arXiv:2505.23585, eq. 9; verl 0.9.1's ``opo``.

    ``length_S`` are the generated tokens of each sample; a group without any has baseline 0. The other parameters are those of
    `libra.train.advantages.grpo`. Exactly 0 if all rewards of a group are equal.
    """
    groups = Groups.of(reward_S, group_S, valid_S)
    weight_S = length_S.to(reward_S.dtype)
    total_K = groups.sum(weight_S)
    baseline_K = groups.sum(weight_S * groups.reward_S) / torch.where(total_K > 0, total_K, torch.ones_like(total_K))
    advantage_S = groups.reward_S - baseline_K[groups.slot_S]
    advantage_S = torch.where(groups.uniform_S, torch.zeros_like(advantage_S), advantage_S)
    return groups.lone(advantage_S, singleton)
