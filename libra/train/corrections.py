"""Corrections for samples of another policy: weights and masks, for mismatch and staleness.

log p_now - log p_engine = (log p_now - log p_old) + (log p_old - log p_engine): staleness (the
weights changed) plus mismatch (engine and trainer compute differently). ``p_old`` is the trainer's
probability under the weights that generated the token; if unknown, the whole ratio counts as
staleness.

Shape legend: N tokens, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from libra.train.losses import LOG_RATIO_BOUND, Sequences, check_option, sequence_mean


def _within(value_N: Tensor, low: float | None, high: float | None) -> Tensor:
    return (value_N >= (-torch.inf if low is None else low)) & (value_N <= (torch.inf if high is None else high))


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
    """Factors (N,) for the loss of each token, without gradient; 0 in masked places.

    Parameters
    ----------
    log_ratio_N : Tensor
        log p_trainer - log p_engine of each token; weights have its dtype (AReaL: float32).
    level : {"token", "sequence", "geometric"}
        Ratio of the token, product over its sequence (verl, TRL), or geometric mean (AReaL).
    action : {"truncate", "mask", "none"}
        Ratios outside [low, high] become the bound (TIS), 0 (IcePop, arXiv:2510.18855), or are
        kept.
    normalize : bool
        Divide by the mean weight of tokens, or of non-empty sequences (verl's ``batch_normalize``).
    bound : float, optional
        The logarithm is first clamped to [-bound, bound] (verl: 20; TRL and AReaL have no clamp).
    """
    check_option("importance_weights level", level, ("token", "sequence", "geometric"))
    check_option("importance_weights action", action, ("truncate", "mask", "none"))
    if level == "token":
        log_N = sequences.only(log_ratio_N)
    else:
        reduced_S = sequences.sum(log_ratio_N) if level == "sequence" else sequence_mean(log_ratio_N, sequences)
        log_N = sequences.spread(reduced_S)
    weight_N = (log_N if bound is None else log_N.clamp(-bound, bound)).exp()
    if action == "truncate" and (low is not None or high is not None):
        weight_N = weight_N.clamp(low, high)
    elif action == "mask":
        weight_N = torch.where(_within(weight_N, low, high), weight_N, torch.zeros_like(weight_N))
    weight_N = sequences.only(weight_N)
    if not normalize:
        return weight_N
    count_S = sequences.count_S
    if level == "token":  # in the dtype of the weights: in float32, an integer count plus 1e-8 rounds to the count
        mean = sequences.sum(weight_N).sum() / (count_S.sum().to(weight_N.dtype) + 1e-8)
    else:
        mean = sequence_mean(weight_N, sequences, eps=1e-8).sum() / (count_S > 0).sum().clamp(min=1)
    return weight_N / torch.where(mean > 1e-8, mean, torch.ones_like(mean))


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
    """Whether a token is kept (N,) bool: low <= metric <= high; False in masked places.

    Parameters
    ----------
    log_ratio_N : Tensor
        d = log p_trainer - log p_engine, clamped to [-bound, bound]; 0 replaces values not finite.
    metric : str
        ``ratio`` e^d; ``k1`` d; ``k2`` d^2/2; ``k3`` e^d - 1 - d (verl); ``k3-reverse`` e^-d - 1 +
        d (AReaL).
    level : {"token", "sequence"}
        Whether tokens or whole sequences are rejected.
    reduce : {"mean", "sum", "max"}
        Reduction over a sequence; for ``ratio``, of the logarithms.
    """
    check_option("rejection_mask metric", metric, ("ratio", "k1", "k2", "k3", "k3-reverse"))
    check_option("rejection_mask level", level, ("token", "sequence"))
    check_option("rejection_mask reduce", reduce, ("mean", "sum", "max"))
    log_N = torch.where(torch.isfinite(log_ratio_N), log_ratio_N, torch.zeros_like(log_ratio_N))
    value_N = log_N = sequences.only(log_N if bound is None else log_N.clamp(-bound, bound))
    if metric == "k2":
        value_N = 0.5 * log_N.square()
    elif metric.startswith("k3"):
        log_N = -log_N if metric == "k3-reverse" else log_N
        value_N = log_N.exp() - 1 - log_N
    if level == "sequence":
        if reduce == "max":
            value_S = sequences.largest(value_N)
        else:
            value_S = sequences.sum(value_N) if reduce == "sum" else sequence_mean(value_N, sequences)
        value_N = sequences.spread(value_S)
    return sequences.mask_N & _within(value_N.exp() if metric == "ratio" else value_N, low, high)


@torch.no_grad()
def binary_kl_mask(
    logp_N: Tensor, old_logp_N: Tensor, sequences: Sequences, *, high: float, eps: float = 1e-6
) -> Tensor:
    """Tokens whose KL of "this token or another" is at most ``high`` both ways (verl, AReaL)."""
    now_N, old_N = logp_N.exp().clamp(eps, 1 - eps), old_logp_N.exp().clamp(eps, 1 - eps)

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    return sequences.mask_N & (torch.maximum(divergence(now_N, old_N), divergence(old_N, now_N)) <= high)


@torch.no_grad()
def off_policy_sequence_mask(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """Tokens with A >= 0, or whose sequence has a mean log p_old - log p up to ``threshold``.
    DeepSeek-V3.2, arXiv:2512.02556; TRL's ``off_policy_mask_threshold``, where rejected tokens
    still count in the denominator."""
    gap_N = torch.nan_to_num(old_logp_N - logp_N, nan=0.0)
    close_N = sequences.spread(sequence_mean(gap_N, sequences) <= threshold)
    return sequences.mask_N & ((advantage_N >= 0) | close_N)


@torch.no_grad()
def m2po_mask(
    log_ratio_N: Tensor, sequences: Sequences, *, threshold: float = 0.04, advantage_N: Tensor | None = None
) -> Tensor:
    """Whether a token is kept (N,) bool; False in masked places. M2PO, arXiv:2510.01161.

    Tokens with the largest squared log ratio (log p_now - log p_behaviour) are masked first, until
    the mean square of the rest is at most ``threshold`` (the paper's 0.04). With ``advantage_N``,
    only tokens that the advantage pushes further away are masked, as in the paper; without it, any
    token (AReaL). The arguments cover a whole minibatch.
    """
    mask_N = sequences.mask_N
    square_N = sequences.only(log_ratio_N).double().square()
    candidate_N = mask_N if advantage_N is None else mask_N & (advantage_N * log_ratio_N > 0)
    count, total = int(mask_N.sum()), float(square_N[mask_N].sum())
    where = torch.nonzero(candidate_N.flatten())[:, 0]
    order = where[square_N.flatten()[where].argsort(descending=True, stable=True)]
    removed = torch.cat([square_N.new_zeros(1), square_N.flatten()[order].cumsum(0)])
    left = count - torch.arange(len(removed), device=removed.device)
    enough = (total - removed) <= threshold * left + 1e-15 * total
    enough[-1] = True  # no further token may be masked
    num_masked = int(torch.nonzero(enough)[0])
    keep = mask_N.flatten().clone()
    keep[order[:num_masked]] = False
    return keep.view(mask_N.shape)


class TwoFactors(NamedTuple):
    """The split of each token's log ratio, without gradient."""

    old_logp_N: Tensor  # of the clipped ratio: the trainer's log-probability where exact, else the engine's
    mismatch_N: Tensor  # log p_old - log p_engine where exact, else 0


@torch.no_grad()
def two_factors(old_logp_N: Tensor, engine_logp_N: Tensor, exact_N: Tensor) -> TwoFactors:
    """The split of the log ratio; ``old_logp_N`` is read only where ``exact_N``."""
    old_N = torch.where(exact_N, old_logp_N, engine_logp_N)
    return TwoFactors(old_N, old_N - engine_logp_N)
