"""Sums, counts and means over groups of samples.

Shape legend: S samples, K groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from libra.errors import TrainError


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
        if not bool(torch.isfinite(reward_S[valid_S]).all()):
            bad = int(torch.nonzero(valid_S & ~torch.isfinite(reward_S))[0])
            raise TrainError(
                f"advantages: sample {bad} has reward {float(reward_S[bad])} and counts as valid; "
                "a valid reward is one finite number, a failed sample must be marked invalid"
            )
        _, slot_S = torch.unique(group_S, return_inverse=True)
        num_groups = int(slot_S.max()) + 1 if slot_S.numel() else 0
        count_K = reward_S.new_zeros(num_groups).index_add(0, slot_S, valid_S.to(reward_S.dtype))
        return cls(slot_S, valid_S, torch.where(valid_S, reward_S, torch.zeros_like(reward_S)), count_K)

    def sum(self, value_S: Tensor) -> Tensor:
        """Sum of each group over its valid samples (K,)."""
        kept_S = torch.where(self.valid_S, value_S, torch.zeros_like(value_S))
        return self.count_K.new_zeros(len(self.count_K)).index_add(0, self.slot_S, kept_S)

    @property
    def mean_S(self) -> Tensor:
        """Mean reward of each sample's group (S,)."""
        return (self.sum(self.reward_S) / self.count_K.clamp(min=1))[self.slot_S]

    @property
    def alone_S(self) -> Tensor:
        """Whether a sample is the only valid one of its group (S,)."""
        return (self.count_K == 1)[self.slot_S] & self.valid_S

    @property
    def uniform_S(self) -> Tensor:
        """Whether all valid rewards of a sample's group are equal, exactly (S,); also in groups of one or none."""
        zeros_K = torch.zeros_like(self.count_K)
        slot_V, reward_V = self.slot_S[self.valid_S], self.reward_S[self.valid_S]
        low_K = zeros_K.scatter_reduce(0, slot_V, reward_V, "amin", include_self=False)
        high_K = zeros_K.scatter_reduce(0, slot_V, reward_V, "amax", include_self=False)
        return (low_K == high_K)[self.slot_S]

    def lone(self, advantage_S: Tensor, singleton: str) -> Tensor:
        """``advantage_S`` with the reward ("reward") or 0 ("zero") for samples that are alone, and 0 if not valid."""
        alone_S = self.reward_S if singleton == "reward" else torch.zeros_like(self.reward_S)
        advantage_S = torch.where(self.alone_S, alone_S, advantage_S)
        return torch.where(self.valid_S, advantage_S, torch.zeros_like(advantage_S))
