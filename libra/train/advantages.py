"""Advantages: how much better than expected a sample or a token was.

Estimators of one reward per sample (S,) take group numbers; estimators of a reward per token take
padded rows (B, T).

Shape legend: S samples of the batch, K groups, G samples of one group, B rows, T places of a row, N
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError

Singleton = Literal["reward", "zero"]
"""The advantage of a group's only valid sample: its reward, or 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Valid samples by group."""

    slot_S: Tensor  # group of each sample, in [0, K), int64
    valid_S: Tensor  # bool
    reward_S: Tensor  # 0 where not valid
    count_K: Tensor  # valid samples of each group, in the dtype of the rewards

    @classmethod
    def of(cls, reward_S: Tensor, group_S: Tensor, valid_S: Tensor | None = None) -> Groups:
        """Sort samples into groups; TrainError if a valid reward is not finite."""
        valid_S = torch.ones_like(group_S, dtype=torch.bool) if valid_S is None else valid_S
        if len(bad := torch.nonzero(valid_S & ~torch.isfinite(reward_S))):
            raise TrainError(
                f"advantages: sample {int(bad[0])} has reward {float(reward_S[bad[0]])} and counts as valid; "
                "a valid reward is one finite number, a failed sample must be marked invalid"
            )
        _, slot_S = torch.unique(group_S, return_inverse=True)
        num_groups = int(slot_S.max()) + 1 if slot_S.numel() else 0
        count_K = reward_S.new_zeros(num_groups).index_add(0, slot_S, valid_S.to(reward_S.dtype))
        return cls(slot_S, valid_S, reward_S.masked_fill(~valid_S, 0), count_K)

    def sum(self, value_S: Tensor) -> Tensor:
        """Sum over the valid samples of each group (K,)."""
        return torch.zeros_like(self.count_K).index_add(0, self.slot_S, value_S.masked_fill(~self.valid_S, 0))

    @property
    def mean_S(self) -> Tensor:
        """Mean reward of each sample's group (S,)."""
        return (self.sum(self.reward_S) / self.count_K.clamp(min=1))[self.slot_S]

    @property
    def alone_S(self) -> Tensor:
        """Whether a sample is the only valid sample of its group (S,)."""
        return (self.count_K == 1)[self.slot_S] & self.valid_S

    @property
    def uniform_S(self) -> Tensor:
        """Whether a group's valid rewards are equal (S,); True for fewer than two."""
        zeros_K = torch.zeros_like(self.count_K)
        slot_V, reward_V = self.slot_S[self.valid_S], self.reward_S[self.valid_S]
        low_K = zeros_K.scatter_reduce(0, slot_V, reward_V, "amin", include_self=False)
        high_K = zeros_K.scatter_reduce(0, slot_V, reward_V, "amax", include_self=False)
        return (low_K == high_K)[self.slot_S]

    def lone(self, advantage_S: Tensor, singleton: Singleton) -> Tensor:
        """``advantage_S``, 0 if invalid, and by ``singleton`` for a group's only valid sample."""
        alone_S = self.reward_S if singleton == "reward" else torch.zeros_like(self.reward_S)
        return torch.where(self.alone_S, alone_S, advantage_S).masked_fill(~self.valid_S, 0)


def grpo(
    reward_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "reward",
) -> Tensor:
    """Reward minus the group's mean (S,), divided by the group's deviation if ``normalize_std``.

    GRPO (DeepSeekMath, arXiv:2402.03300) with verl's defaults; TRL has ``eps=1e-4``. Dr.GRPO
    (arXiv:2503.20783) has ``normalize_std=False``. ``group_S`` has a number per group. A sample
    outside ``valid_S`` does not count and gets 0; its reward may be NaN. The divisor is the
    deviation plus ``eps``; ``ddof`` is 1 for the unbiased deviation (verl, TRL), else 0. Exactly 0
    if all valid rewards of a group are equal. TrainError if a valid reward is not finite.
    """
    groups = Groups.of(reward_S, group_S, valid_S)
    deviation_S = torch.where(groups.valid_S, groups.reward_S - groups.mean_S, torch.zeros_like(reward_S))
    deviation_S = deviation_S.masked_fill(groups.uniform_S, 0)
    if not normalize_std:
        return groups.lone(deviation_S, singleton)
    variance_K = groups.sum(deviation_S.square()) / (groups.count_K - ddof).clamp(min=1)
    scale_S = (variance_K.sqrt() + eps)[groups.slot_S]
    advantage_S = torch.where(groups.alone_S, deviation_S, deviation_S / scale_S)
    return torch.where(groups.alone_S, groups.lone(advantage_S, singleton) / (1 + eps), advantage_S)


def rloo(
    reward_S: Tensor, group_S: Tensor, *, valid_S: Tensor | None = None, singleton: Singleton = "reward"
) -> Tensor:
    """Reward minus the mean reward of the siblings (S,), as `grpo`. RLOO, arXiv:2402.14740; verl
    0.9.1. ``singleton`` is verl's ``rloo`` ("reward") or ``rloo_vectorized`` ("zero")."""
    groups = Groups.of(reward_S, group_S, valid_S)
    factor_S = (groups.count_K / (groups.count_K - 1).clamp(min=1))[groups.slot_S]
    advantage_S = (groups.reward_S - groups.mean_S) * factor_S
    return groups.lone(advantage_S.masked_fill(groups.uniform_S, 0), singleton)


def opo(
    reward_S: Tensor,
    length_S: Tensor,
    group_S: Tensor,
    *,
    valid_S: Tensor | None = None,
    singleton: Singleton = "reward",
) -> Tensor:
    """Reward minus the length-weighted mean reward of the group (S,), as `grpo`. OPO,
    arXiv:2505.23585, eq. 9; verl 0.9.1. ``length_S`` counts generated tokens; a group without
    tokens has baseline 0."""
    groups = Groups.of(reward_S, group_S, valid_S)
    weight_S = length_S.to(reward_S.dtype)
    total_K = groups.sum(weight_S)
    baseline_K = groups.sum(weight_S * groups.reward_S) / torch.where(total_K > 0, total_K, torch.ones_like(total_K))
    advantage_S = groups.reward_S - baseline_K[groups.slot_S]
    return groups.lone(advantage_S.masked_fill(groups.uniform_S, 0), singleton)


def whiten(value_N: Tensor, weight_N: Tensor) -> Tensor:
    """``(value - mean) / sqrt(variance + 1e-8)``, unbiased, as verl 0.9.1's masked_whiten.

    ``weight_N`` is how often a value counts. If the weights sum to 1 or less, or all counted values
    are equal, the mean is subtracted without division: dividing by sqrt(1e-8) would amplify
    rounding.
    """
    weight_N = weight_N.to(value_N.dtype)
    counted_N = value_N.masked_fill(weight_N <= 0, 0)
    total = weight_N.sum()
    mean = (counted_N * weight_N).sum() / (total + 1e-8)
    seen_N = value_N[weight_N > 0]
    if float(total) <= 1 or float(seen_N.amin()) == float(seen_N.amax()):
        return value_N - (seen_N[0] if seen_N.numel() else mean)  # no rounding where all are equal
    variance = ((counted_N - mean).square() * weight_N).sum() / (total + 1e-8) * total / (total - 1)
    return (value_N - mean) * torch.rsqrt(variance + 1e-8)


def reinforce_pp(reward_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of REINFORCE++, arXiv:2501.03262, as in verl 0.9.1. Masked
    places have return 0; their rewards are ignored, and they add no discount."""
    mask_BT = mask_BT.to(reward_BT.dtype)
    return_BT = torch.zeros_like(reward_BT)
    running_B = reward_BT.new_zeros(len(reward_BT))
    for place in reversed(range(reward_BT.shape[1])):
        mask_B = mask_BT[:, place]
        running_B = torch.where(mask_B > 0, reward_BT[:, place] + gamma * running_B, running_B)
        return_BT[:, place] = running_B * mask_B
    return whiten(return_BT, mask_BT) * mask_BT, return_BT


def reinforce_pp_baseline(
    reward_S: Tensor, length_S: Tensor, group_S: Tensor, *, valid_S: Tensor | None = None
) -> Tensor:
    """Reward minus the group's mean, whitened over the batch's tokens (S,); as in verl 0.9.1.
    ``length_S`` counts tokens. A group's only valid sample keeps its reward before whitening."""
    centred_S = grpo(reward_S, group_S, valid_S=valid_S, normalize_std=False)
    if valid_S is None:
        return whiten(centred_S, length_S)
    return whiten(centred_S, length_S.masked_fill(~valid_S, 0)).masked_fill(~valid_S, 0)


def remax(reward_BT: Tensor, baseline_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of ReMax, arXiv:2310.10505; agrees with verl 0.9.1.
    ``reward_BT`` is the reward of each token (an outcome reward is on the last token),
    ``baseline_B`` the reward of the greedy answer, and ``mask_BT`` is 1 for generated tokens."""
    return_BT = (reward_BT * mask_BT).flip(-1).cumsum(-1).flip(-1)
    return return_BT - baseline_B[:, None] * mask_BT, return_BT


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """One group as the input of an estimator; arrays (G,)."""

    reward: NDArray[np.float64]  # may be NaN where not valid
    valid: NDArray[np.bool_]  # False for failures that do not train
    num_tokens: NDArray[np.int64]  # generated
    finished: NDArray[np.bool_]  # False where the answer was cut off
    greedy: NDArray[np.bool_] | None = None  # True for the baseline of ReMax; None: the first


def batch_advantages(
    groups: Sequence[GroupRewards],
    estimator: str | Callable[[Sequence[GroupRewards]], Sequence[NDArray[np.float64]]],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    drop_uniform_groups: bool = False,
    drop_truncated: bool = False,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.bool_]]]:
    """Advantage of every sample, and whether the sample trains; an array (G,) of each per group.

    ``estimator`` is one of `libra.config.algorithms.ADVANTAGES`, or a function of the groups. An
    invalid sample has advantage 0, and so has the only valid sample of a larger group; a group
    configured with one sample keeps its reward. A sample that does not train counts in its group's
    baseline, but in no denominator of the step.
    """
    if not groups:
        return [], []
    sizes = [len(group.reward) for group in groups]

    def column(name: str, dtype: type) -> Tensor:
        return torch.as_tensor(np.concatenate([getattr(group, name) for group in groups]).astype(dtype))

    reward_S, length_S = column("reward", np.float64), column("num_tokens", np.int64)
    valid_S, finished_S = column("valid", np.bool_), column("finished", np.bool_)
    group_S = torch.repeat_interleave(torch.arange(len(groups)), torch.as_tensor(sizes))
    trains_S, zero_S = valid_S, ~valid_S
    if callable(estimator):
        advantage_S = torch.as_tensor(np.concatenate(estimator(groups)))
    elif estimator == "remax":
        advantage_S, trains_S = _against_greedy(groups, reward_S, valid_S)
        zero_S = ~trains_S
    elif estimator == "reinforce_pp":
        advantage_S = whiten(reward_S.masked_fill(~valid_S, 0), length_S.masked_fill(~valid_S, 0))
    else:
        lone_S = Groups.of(reward_S, group_S, valid_S).alone_S & (torch.as_tensor(sizes) > 1)[group_S]
        zero_S = zero_S | lone_S
        by_name: dict[str, Callable[[], Tensor]] = {
            "grpo": lambda: grpo(reward_S, group_S, valid_S=valid_S, normalize_std=normalize_std, eps=eps),
            "rloo": lambda: rloo(reward_S, group_S, valid_S=valid_S),
            "opo": lambda: opo(reward_S, length_S, group_S, valid_S=valid_S),
            "reinforce_pp_baseline": lambda: reinforce_pp_baseline(
                reward_S, length_S, group_S, valid_S=valid_S & ~lone_S
            ),
        }
        advantage_S = by_name[estimator]()
    advantage_S = advantage_S.masked_fill(zero_S, 0)
    if drop_uniform_groups:
        trains_S = trains_S & ~Groups.of(reward_S, group_S, valid_S).uniform_S
    if drop_truncated:
        trains_S = trains_S & finished_S
    return [part.numpy() for part in advantage_S.split(sizes)], [part.numpy() for part in trains_S.split(sizes)]


def _against_greedy(groups: Sequence[GroupRewards], reward_S: Tensor, valid_S: Tensor) -> tuple[Tensor, Tensor]:
    baseline_S, takes_part_S, start = torch.zeros_like(reward_S), valid_S.clone(), 0
    for group in groups:
        members = slice(start, start + len(group.reward))
        start = members.stop
        greedy = np.arange(len(group.reward)) == 0 if group.greedy is None else group.greedy
        sound = np.flatnonzero(greedy & group.valid)
        takes_part_S[members] &= torch.from_numpy(~greedy) & bool(len(sound))
        if len(sound):
            baseline_S[members] = float(group.reward[sound[0]])
    outcome_S1 = reward_S.masked_fill(~takes_part_S, 0)[:, None]
    advantage_S1, _ = remax(outcome_S1, baseline_S, takes_part_S[:, None].to(reward_S.dtype))
    return advantage_S1[:, 0], takes_part_S
