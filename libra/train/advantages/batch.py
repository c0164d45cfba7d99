"""The advantages of a whole batch of groups, by the name of the estimator in the configuration.

Shape legend: G samples of one group, S those of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.train.advantages.filters import informative
from libra.train.advantages.global_baseline import reinforce_pp_baseline, reinforce_pp_outcome
from libra.train.advantages.greedy_baseline import remax
from libra.train.advantages.group_relative import grpo
from libra.train.advantages.leave_one_out import rloo
from libra.train.advantages.optimal_baseline import opo


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """One group as an estimator sees it; arrays (G,)."""

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
    """Advantage of every sample, and whether it takes part in the loss; one array (G,) each per group.

    Samples that are not valid have advantage 0. So has the only valid sample of a larger group; a group configured with one
    sample keeps its reward as its deviation. A sample outside the loss counts in no denominator of the step, but counts in
    the baseline of its group.

    Parameters
    ----------
    estimator : str or callable
        A name of `libra.config.algorithms.AdvantageName`, or a function of the groups with one array (G,) for each.
    """
    _check_lengths(groups)
    if not groups:
        return [], []
    sizes = [len(group.reward) for group in groups]
    rows = _stacked(groups, sizes)
    advantage_S, valid_S, idle_S = _estimated(groups, rows, estimator, normalize_std, eps)
    advantage_S = torch.where(idle_S, torch.zeros_like(advantage_S), advantage_S)
    trains_S = valid_S
    if drop_uniform_groups:
        trains_S = trains_S & informative(rows.reward_S, rows.group_S, valid_S=rows.valid_S)
    if drop_truncated:
        trains_S = trains_S & rows.finished_S
    return [part.numpy() for part in advantage_S.split(sizes)], [part.numpy() for part in trains_S.split(sizes)]


def _check_lengths(groups: Sequence[GroupRewards]) -> None:
    for index, group in enumerate(groups):
        sizes = {len(group.reward), len(group.valid), len(group.num_tokens), len(group.finished)}
        if len(sizes) != 1:
            raise TrainError(
                f"batch_advantages: the arrays of group {index} have lengths {sorted(sizes)}; allowed is one"
            )


class _Rows(NamedTuple):
    """The samples of all groups, one after the other. ``lone_S``: the only valid one of a larger group."""

    reward_S: Tensor
    valid_S: Tensor
    length_S: Tensor
    finished_S: Tensor
    group_S: Tensor
    lone_S: Tensor


def _stacked(groups: Sequence[GroupRewards], sizes: Sequence[int]) -> _Rows:
    reward_S = torch.as_tensor(np.concatenate([group.reward for group in groups]).astype(np.float64))
    valid_S = torch.as_tensor(np.concatenate([group.valid for group in groups]).astype(np.bool_))
    length_S = torch.as_tensor(np.concatenate([group.num_tokens for group in groups]).astype(np.int64))
    finished_S = torch.as_tensor(np.concatenate([group.finished for group in groups]).astype(np.bool_))
    group_S = torch.repeat_interleave(torch.arange(len(groups)), torch.as_tensor(sizes))
    configured_alone_S = torch.as_tensor(np.repeat([size == 1 for size in sizes], sizes))
    siblings_S = torch.zeros(len(groups), dtype=torch.int64).index_add(0, group_S, valid_S.to(torch.int64))[group_S]
    lone_S = valid_S & (siblings_S == 1) & ~configured_alone_S
    return _Rows(reward_S, valid_S, length_S, finished_S, group_S, lone_S)


def _estimated(
    groups: Sequence[GroupRewards],
    rows: _Rows,
    estimator: str | Callable[[Sequence[GroupRewards]], Sequence[NDArray[np.float64]]],
    normalize_std: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, which samples are valid by the estimator, and whose advantage is 0 whatever it says."""
    reward_S, valid_S, length_S, _, group_S, lone_S = rows
    if callable(estimator):  # lone ones are its own decision
        return torch.as_tensor(np.concatenate(estimator(groups))), valid_S, ~valid_S
    if estimator == "remax":
        advantage_S, valid_S = _against_greedy(groups, reward_S, valid_S)
        return advantage_S, valid_S, ~valid_S
    if estimator == "reinforce_pp":
        weight_S = torch.where(valid_S, length_S, torch.zeros_like(length_S))
        advantage_S = reinforce_pp_outcome(torch.where(valid_S, reward_S, torch.zeros_like(reward_S)), weight_S)
        return advantage_S, valid_S, ~valid_S
    if estimator == "reinforce_pp_baseline":
        advantage_S = reinforce_pp_baseline(reward_S, length_S, group_S, valid_S=valid_S & ~lone_S)
    elif estimator == "rloo":
        advantage_S = rloo(reward_S, group_S, valid_S=valid_S)
    elif estimator == "opo":
        advantage_S = opo(reward_S, length_S, group_S, valid_S=valid_S)
    else:
        advantage_S = grpo(reward_S, group_S, valid_S=valid_S, normalize_std=normalize_std, eps=eps)
    return advantage_S, valid_S, ~valid_S | lone_S


def _against_greedy(groups: Sequence[GroupRewards], reward_S: Tensor, valid_S: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages over the greedy sample of the group, and who may train: not that sample, and nobody where it failed."""
    baseline_S, takes_part_S = torch.zeros_like(reward_S), valid_S.clone()
    start = 0
    for group in groups:
        members = slice(start, start + len(group.reward))
        start = members.stop
        greedy = np.arange(len(group.reward)) == 0 if group.greedy is None else group.greedy
        sound = np.flatnonzero(greedy & group.valid)
        takes_part_S[members] &= torch.from_numpy(~greedy) & bool(len(sound))
        if len(sound):
            baseline_S[members] = float(group.reward[sound[0]])
    outcome_S1 = torch.where(takes_part_S, reward_S, torch.zeros_like(reward_S))[:, None]
    advantage_S1, _ = remax(outcome_S1, baseline_S, takes_part_S[:, None].to(reward_S.dtype))
    return advantage_S1[:, 0], takes_part_S
