"""Rejection masks: tokens or whole sequences whose probability moved too far are excluded from the loss.

Shape legend: N tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.choice_check import check_option
from libra.train.losses.ratio import LOG_RATIO_BOUND
from libra.train.sequences import Sequences, sequence_mean

METRICS = ("ratio", "k1", "k2", "k3", "k3-reverse")


@torch.no_grad()
def rejection_mask(
    log_ratio_N: Tensor,
    sequences: Sequences,
    *,
    metric: str = "ratio",
    level: str = "token",
    reduce: str = "mean",
    low: float | None = None,
    high: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """Whether a token is kept (N,) bool; False in masked places. Use it as ``sequences.where(mask)``.

    Parameters
    ----------
    log_ratio_N : Tensor
        log p_trainer - log p_engine, called d below; a value that is not finite counts as 0.
    metric : str
        ``ratio`` e^d; ``k1`` d; ``k2`` d^2/2; ``k3`` e^d - 1 - d (verl); ``k3-reverse`` e^-d - 1 + d (AReaL's ``kl_k3``).
    level : {"token", "sequence"}
        What is kept or rejected.
    reduce : {"mean", "sum", "max"}
        From tokens to a sequence; of the logarithm for ``ratio``: geometric mean, product, or largest.
    low, high : float, optional
        Kept where low <= metric <= high. None: no bound on that side.
    bound : float, optional
        d is clamped to [-bound, bound] (verl: 20). None: no clamp (AReaL).
    """
    check_option("rejection_mask metric", metric, METRICS)
    check_option("rejection_mask level", level, ("token", "sequence"))
    check_option("rejection_mask reduce", reduce, ("mean", "sum", "max"))
    log_N = torch.where(torch.isfinite(log_ratio_N), log_ratio_N, torch.zeros_like(log_ratio_N))
    log_N = sequences.only(log_N if bound is None else log_N.clamp(-bound, bound))
    value_N = {
        "ratio": lambda: log_N,
        "k1": lambda: log_N,
        "k2": lambda: 0.5 * log_N.square(),
        "k3": lambda: log_N.exp() - 1 - log_N,
        "k3-reverse": lambda: (-log_N).exp() - 1 + log_N,
    }[metric]()
    if level == "sequence":
        if reduce == "max":
            value_S = sequences.largest(value_N)
        else:
            value_S = sequences.sum(value_N) if reduce == "sum" else sequence_mean(value_N, sequences)
        value_N = sequences.spread(value_S)
    if metric == "ratio":
        value_N = value_N.exp()
    keep_N = sequences.mask_N.clone()
    if low is not None:
        keep_N &= value_N >= low
    if high is not None:
        keep_N &= value_N <= high
    return keep_N


@torch.no_grad()
def binary_kl_mask(
    logp_N: Tensor, old_logp_N: Tensor, sequences: Sequences, *, high: float, eps: float = 1e-6
) -> Tensor:
    """Kept where the KL of "this token or another" is at most ``high`` in both directions (verl's and AReaL's ``binary_kl``)."""
    now_N, old_N = logp_N.exp().clamp(eps, 1 - eps), old_logp_N.exp().clamp(eps, 1 - eps)

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    return sequences.mask_N & (torch.maximum(divergence(now_N, old_N), divergence(old_N, now_N)) <= high)


@torch.no_grad()
def off_policy_sequence_mask(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """Kept where A >= 0, or the mean of log p_old - log p over the sequence is at most ``threshold``.

    DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence masking; TRL's ``off_policy_mask_threshold``, where rejected tokens
    still count in the denominator.
    """
    gap_N = torch.nan_to_num(old_logp_N - logp_N, nan=0.0)
    close_N = sequences.spread(sequence_mean(gap_N, sequences) <= threshold)
    return sequences.mask_N & ((advantage_N >= 0) | close_N)
