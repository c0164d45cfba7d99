"""Advantages: how much better than expected a sample, or a token, was.

Estimators on one reward per sample (S,) take group numbers and may leave failed samples out; those with a reward or a value
per token take padded rows (B, T).
"""

from __future__ import annotations

from libra.train.advantages.batch import GroupRewards, batch_advantages
from libra.train.advantages.filters import informative, not_overlong
from libra.train.advantages.generalized import gae
from libra.train.advantages.global_baseline import reinforce_pp, reinforce_pp_baseline, reinforce_pp_outcome
from libra.train.advantages.greedy_baseline import remax, reward_to_go
from libra.train.advantages.group_relative import group_advantages, grpo
from libra.train.advantages.leave_one_out import rloo
from libra.train.advantages.optimal_baseline import opo
from libra.train.advantages.whitening import whiten

__all__ = [
    "GroupRewards",
    "batch_advantages",
    "gae",
    "group_advantages",
    "grpo",
    "informative",
    "not_overlong",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reinforce_pp_outcome",
    "remax",
    "reward_to_go",
    "rloo",
    "whiten",
]
