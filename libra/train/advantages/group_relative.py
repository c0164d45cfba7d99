"""Group-relative advantages: the reward of a sample against those of its siblings.

Shape legend: S samples of the batch, G samples of one group.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.train.advantages.groups import Groups


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
    """Reward minus the mean of its group, with ``normalize_std`` divided by the group's standard deviation.

    GRPO (DeepSeekMath, arXiv:2402.03300) with verl's conventions as defaults; ``normalize_std=False`` is the
    advantage of Dr.GRPO (arXiv:2503.20783). TRL: ``eps=1e-4``.

    Parameters
    ----------
    reward_S : floating tensor (S,)
        Ignored (may be NaN) where ``valid_S`` is False. TrainError if a valid one is not finite.
    group_S : integer tensor (S,)
        Samples with the same number are siblings, in any order.
    valid_S : bool tensor (S,), optional
        False excludes a sample from mean and deviation, and gives it advantage 0.
    normalize_std, ddof, eps
        Divide by (standard deviation + eps); ``ddof`` 1: unbiased (verl, TRL), 0: of the population.
    singleton : {"reward", "zero"}
        Advantage of the only valid sample of its group: its reward, i.e. mean 0 and deviation 1 (verl), or 0.

    Returns
    -------
    Tensor (S,)
        Exactly 0 if all valid rewards of a group are equal: rounding in the mean leaves no gradient.
    """
    groups = Groups.of(reward_S, group_S, valid_S)
    deviation_S = torch.where(groups.valid_S, groups.reward_S - groups.mean_S, torch.zeros_like(reward_S))
    deviation_S = torch.where(groups.uniform_S, torch.zeros_like(deviation_S), deviation_S)
    if not normalize_std:
        return groups.lone(deviation_S, singleton)
    variance_K = groups.sum(deviation_S.square()) / (groups.count_K - ddof).clamp(min=1)
    scale_S = (variance_K.sqrt() + eps)[groups.slot_S]
    advantage_S = torch.where(groups.alone_S, deviation_S, deviation_S / scale_S)
    return torch.where(groups.alone_S, groups.lone(advantage_S, singleton) / (1 + eps), advantage_S)


def group_advantages(
    rewards: ArrayLike, valid: ArrayLike, *, normalize_std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> NDArray[np.float64]:
    """Advantages of one group (G,) of rewards (G,), in float64; `grpo` for callers that hold numpy arrays.

    ``rewards`` may be NaN where ``valid`` is False; such a sample gets 0. A group configured with one sample keeps its
    reward as advantage; the only valid sample of a larger group gets 0.
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
