"""ReMax: a sample against the reward of the greedy answer to the same prompt.

Shape legend: B rows, T places of a row.
"""

from __future__ import annotations

from torch import Tensor


def reward_to_go(reward_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum of the unmasked rewards from each place to the end of the row (B, T)."""
    return (reward_BT * mask_BT).flip(-1).cumsum(-1).flip(-1)


def remax(reward_BT: Tensor, baseline_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T). ReMax, arXiv:2310.10505; agrees with verl 0.9.1.

    ``reward_BT`` is the reward of each token (an outcome reward is on the last one), ``baseline_B`` that of the greedy answer;
    ``mask_BT`` is 1 for generated tokens, 0 for padding and observations. ``trainer.advantage=remax``: the first sample of each
    group is the greedy answer.
    """
    return_BT = reward_to_go(reward_BT, mask_BT)
    return return_BT - baseline_B[:, None] * mask_BT, return_BT
