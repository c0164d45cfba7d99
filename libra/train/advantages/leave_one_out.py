"""RLOO: a sample against the mean of the *other* samples of its group.

Shape legend: S samples of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from libra.train.advantages.groups import Groups


def rloo(
    reward_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    singleton: Literal["reward", "zero"] = "reward",
) -> Tensor:
    """Reward minus the mean reward of the siblings (S,). RLOO, arXiv:2402.14740; agrees with verl 0.9.1.

    Equal to n / (n - 1) times the deviation from the mean of all n. Parameters are those of
    `libra.train.advantages.grpo`; the only valid sample of a group keeps its reward (verl ``rloo``) or gets 0 (verl
    ``rloo_vectorized``). Exactly 0 if all rewards of a group are equal.
    """
    groups = Groups.of(reward_S, group_S, valid_S)
    factor_S = (groups.count_K / (groups.count_K - 1).clamp(min=1))[groups.slot_S]
    advantage_S = (groups.reward_S - groups.mean_S) * factor_S
    advantage_S = torch.where(groups.uniform_S, torch.zeros_like(advantage_S), advantage_S)
    return groups.lone(advantage_S, singleton)
