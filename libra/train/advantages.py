"""Group-relative advantages: how much better a sample did than its siblings.

Shape legend: S samples of the batch, G samples of one group.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from libra.errors import TrainError


def grpo(
    reward_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["reward", "zero"] = "reward",
) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation where asked.

    GRPO (DeepSeekMath, arXiv:2402.03300) with verl's conventions as defaults; ``normalize_std=False`` is the
    advantage of Dr.GRPO (arXiv:2503.20783).

    Parameters
    ----------
    reward_S : floating tensor (S,)
        One number per sample; ignored (may be NaN) where ``valid_S`` is False.
    group_S : integer tensor (S,)
        Samples with the same number are siblings. Any integers, in any order.
    valid_S : bool tensor (S,), optional
        False excludes a sample from mean and deviation, and gives it advantage 0. None: all are valid.
    normalize_std : bool
        Divide by (standard deviation + eps).
    ddof : int
        1: unbiased deviation (verl, TRL); 0: of the population.
    eps : float
    singleton : {"reward", "zero"}
        Advantage of the only valid sample of its group: its reward, i.e. mean 0 and deviation 1 (verl), or 0.

    Returns
    -------
    Tensor (S,)
        Same dtype. Exactly 0 where all valid rewards of a group are equal: rounding in the mean leaves no gradient.

    Raises
    ------
    TrainError
        Where a valid reward is not finite.
    """
    valid_S = torch.ones_like(group_S, dtype=torch.bool) if valid_S is None else valid_S
    if not bool(torch.isfinite(reward_S[valid_S]).all()):
        bad = int(torch.nonzero(valid_S & ~torch.isfinite(reward_S))[0])
        raise TrainError(
            f"advantages: sample {bad} has reward {float(reward_S[bad])} and counts as valid; "
            "a valid reward is one finite number, a failed sample must be marked invalid"
        )
    reward_S = torch.where(valid_S, reward_S, torch.zeros_like(reward_S))
    _, slot_S = torch.unique(group_S, return_inverse=True)
    num_groups = int(slot_S.max()) + 1 if slot_S.numel() else 0
    weight_S = valid_S.to(reward_S.dtype)
    zeros = reward_S.new_zeros(num_groups)

    count = zeros.index_add(0, slot_S, weight_S)
    mean = zeros.index_add(0, slot_S, reward_S) / count.clamp(min=1)
    deviation_S = (reward_S - mean[slot_S]) * weight_S
    low = zeros.scatter_reduce(0, slot_S[valid_S], reward_S[valid_S], "amin", include_self=False)
    high = zeros.scatter_reduce(0, slot_S[valid_S], reward_S[valid_S], "amax", include_self=False)
    deviation_S = torch.where((low == high)[slot_S], torch.zeros_like(deviation_S), deviation_S)
    scale = torch.ones_like(mean)
    if normalize_std:
        variance = zeros.index_add(0, slot_S, deviation_S.square()) / (count - ddof).clamp(min=1)
        scale = variance.sqrt() + eps

    alone_S = (count == 1)[slot_S] & valid_S
    advantage_S = deviation_S / scale[slot_S]
    lone = reward_S / (1 + eps) if normalize_std else reward_S
    return torch.where(alone_S, lone if singleton == "reward" else torch.zeros_like(lone), advantage_S)


def group_advantages(
    rewards: ArrayLike, valid: ArrayLike, *, normalize_std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> NDArray[np.float64]:
    """Advantages of one group (G,) of rewards (G,), in float64; `grpo` for callers that hold numpy arrays.

    ``rewards`` may be NaN where ``valid`` is False; such a sample gets 0. A group configured with one sample keeps its
    reward as advantage; a larger group of which failures left one valid sample teaches nothing, so that one gets 0.
    """
    reward_G = torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    valid_G = torch.as_tensor(np.asarray(valid, dtype=np.bool_))
    if reward_G.ndim != 1 or reward_G.shape != valid_G.shape:
        raise TrainError(
            f"group_advantages: rewards have shape {tuple(reward_G.shape)} and valid {tuple(valid_G.shape)}; "
            "both are one number per sample of the group (G,)"
        )
    return grpo(
        reward_G,
        torch.zeros(len(reward_G), dtype=torch.int64),
        valid_S=valid_G,
        normalize_std=normalize_std,
        ddof=ddof,
        eps=eps,
        singleton="reward" if len(reward_G) == 1 else "zero",
    ).numpy()
