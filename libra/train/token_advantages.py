"""Advantages that the trainer computes itself, because tokens have rewards: a KL penalty in the reward, or discounted returns.

A token's reward is ``-kl_coef x KL estimate`` (``trainer.kl_in_reward``); a trajectory's own is that of its last token.
The batch is whole here, or a wave of whole groups; its members that may not train are not in it.

Shape legend: S samples, T actions of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.train.advantages import reinforce_pp, rloo
from libra.train.kl import KLCoefficient, kl_estimate
from libra.train.replica_settings import TrainSettings
from libra.train.samples import Sample
from libra.train.slice_gradient import SliceGradient
from libra.train.step_report import Tally


def has_token_rewards(settings: TrainSettings) -> bool:
    """Whether advantages are to be computed here."""
    penalty = settings.kl_in_reward and settings.kl_coef > 0
    return penalty or (settings.advantage == "reinforce_pp" and settings.gamma < 1)


def with_token_advantages(
    gradient: SliceGradient, samples: Sequence[Sample], coefficient: KLCoefficient, tally: Tally
) -> list[Sample]:
    """``samples`` with an advantage for each token."""
    settings = gradient.settings
    if not samples:
        return []
    penalties: list[NDArray[np.float64]] = [np.zeros(sample.num_actions) for sample in samples]
    if settings.kl_in_reward and settings.kl_coef > 0:
        reference = gradient.scored(samples, by_reference=True)
        estimates = [_kl(sample, one, settings) for sample, one in zip(samples, reference, strict=True)]
        penalties = [coefficient.value * each for each in estimates]
        total, count = coefficient.seen
        coefficient.seen = (total + sum(float(each.mean()) for each in estimates), count + len(estimates))
        tally.add(
            kl_reward=sum(float(each.sum()) for each in estimates),
            kl_reward_tokens=sum(len(each) for each in estimates),
        )
    lengths = [sample.num_actions for sample in samples]
    mask_ST = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    reward_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
    for row, (sample, penalty) in enumerate(zip(samples, penalties, strict=True)):
        reward_ST[row, : len(penalty)] = -torch.from_numpy(penalty)
        reward_ST[row, len(penalty) - 1] += sample.reward
    advantage_ST = _advantages(reward_ST, mask_ST, samples, settings)
    return [
        replace(sample, token_advantage=row[: sample.num_actions].numpy())
        for sample, row in zip(samples, advantage_ST, strict=True)
    ]


def _advantages(reward_ST: Tensor, mask_ST: Tensor, samples: Sequence[Sample], settings: TrainSettings) -> Tensor:
    if settings.advantage == "reinforce_pp":
        return reinforce_pp(reward_ST, mask_ST, gamma=settings.gamma)[0]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
    group_S = torch.tensor([numbers[sample.group] for sample in samples])
    advantage_S = rloo(reward_ST.sum(-1), group_S, singleton="reward" if settings.group_size == 1 else "zero")
    return advantage_S[:, None].expand(reward_ST.shape).clone()


def _kl(sample: Sample, reference_logp: NDArray[np.floating], settings: TrainSettings) -> NDArray[np.float64]:
    bound = settings.kl_bound
    logp_A, reference_A = (
        torch.from_numpy(each.astype(np.float64)) for each in (sample.behaviour_logp, reference_logp)
    )
    kl_A = kl_estimate(
        logp_A,
        reference_A,
        settings.kl_estimator,
        bound=bound,
        log_ratio_bound=None if bound is None else 2 * bound,
    )
    return np.asarray(kl_A.numpy(), dtype=np.float64)
