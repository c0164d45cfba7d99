"""Importance weights of the trainer's policy against the one that sampled: truncated (TIS) or cut out (IcePop).

Shape legend: N tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.choice_check import check_option
from libra.train.losses.ratio import LOG_RATIO_BOUND
from libra.train.sequences import Sequences, sequence_mean

LEVELS = ("token", "sequence", "geometric")
ACTIONS = ("truncate", "mask", "none")


@torch.no_grad()
def importance_weights(
    log_ratio_N: Tensor,
    sequences: Sequences,
    *,
    level: str = "token",
    action: str = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    normalize: bool = False,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """Weights (N,) without gradient, 0 in masked places, to multiply the loss of each token with.

    Parameters
    ----------
    log_ratio_N : Tensor
        log p_trainer - log p_engine of each token; its dtype is that of the weights (AReaL: float32).
    level : {"token", "sequence", "geometric"}
        Ratio of the token, product over its sequence (verl, TRL ``sequence_*``), or geometric mean over it (AReaL).
    action : {"truncate", "mask", "none"}
        Ratios outside [low, high] become the bound (TIS), 0 (IcePop, arXiv:2510.18855), or stay.
    low, high : float, optional
        None: no bound on that side.
    normalize : bool
        Divide by the mean weight: of the tokens, or of the sequences that have any (verl's ``batch_normalize``).
    bound : float, optional
        The logarithm is clamped to [-bound, bound] first (verl: 20). None: no clamp (TRL, AReaL).
    """
    check_option("importance_weights level", level, LEVELS)
    check_option("importance_weights action", action, ACTIONS)
    if level == "token":
        log_N = sequences.only(log_ratio_N)
    else:
        reduced_S = sequences.sum(log_ratio_N) if level == "sequence" else sequence_mean(log_ratio_N, sequences)
        log_N = sequences.spread(reduced_S)
    weight_N = (log_N if bound is None else log_N.clamp(-bound, bound)).exp()
    if action == "truncate" and (low is not None or high is not None):
        weight_N = weight_N.clamp(low, high)
    elif action == "mask":
        inside_N = torch.ones_like(weight_N, dtype=torch.bool)
        if low is not None:
            inside_N &= weight_N >= low
        if high is not None:
            inside_N &= weight_N <= high
        weight_N = torch.where(inside_N, weight_N, torch.zeros_like(weight_N))
    weight_N = sequences.only(weight_N)
    return weight_N / _mean_weight(weight_N, sequences, per_sequence=level != "token") if normalize else weight_N


def _mean_weight(weight_N: Tensor, sequences: Sequences, *, per_sequence: bool) -> Tensor:
    """Mean over tokens, or over the sequences that have any; 1 if it is 0."""
    count_S = sequences.count_S
    if per_sequence:
        mean = sequence_mean(weight_N, sequences, eps=1e-8).sum() / (count_S > 0).sum().clamp(min=1)
    else:
        # in the dtype of the weights: in float32, an integer count plus 1e-8 rounds to the count
        mean = sequences.sum(weight_N).sum() / (count_S.sum().to(weight_N.dtype) + 1e-8)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


@torch.no_grad()
def effective_sample_frac(weight_N: Tensor, sequences: Sequences) -> float:
    """Effective sample size over the number of tokens, ``(sum w)^2 / (n sum w^2)``: 1 for equal weights, 0 for none (Kish)."""
    count = int(sequences.count_S.sum())
    total, square = sequences.sum(weight_N).sum(), sequences.sum(weight_N.square()).sum()
    return float(total.square() / (count * square)) if count and float(square) > 0 else 0.0
