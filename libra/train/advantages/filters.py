"""Filters of a step: groups of equal rewards, and truncated answers.

Shape legend: S samples of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.advantages.groups import Groups


def informative(
    reward_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Whether the rewards of a sample's group differ (S,) bool. DAPO's dynamic sampling, arXiv:2503.14476, sec. 3.2.

    With ``low`` or ``high`` a group is kept if its mean reward is strictly between them (DAPO's "accuracy 0 or 1": ``low=0,
    high=1``). The caller refills the batch with new prompts.
    """
    groups = Groups.of(reward_S, group_S, valid_S)
    if low is None and high is None:
        return ~groups.uniform_S & groups.valid_S
    mean_S = groups.mean_S
    keep_S = groups.valid_S
    if low is not None:
        keep_S = keep_S & (mean_S > low)
    if high is not None:
        keep_S = keep_S & (mean_S < high)
    return keep_S


def not_overlong(length_S: Tensor, max_tokens: int, *, finished_S: Tensor | None = None) -> Tensor:
    """Whether a sample ended by itself within ``max_tokens`` (S,) bool. DAPO's overlong filtering, sec. 3.4.

    ``finished_S`` False marks samples that were cut off whatever their length (TRL's ``mask_truncated_completions``).
    Their loss is masked; they still take part in the baseline of their group.
    """
    keep_S = torch.as_tensor(length_S) < max_tokens
    return keep_S if finished_S is None else keep_S & finished_S
