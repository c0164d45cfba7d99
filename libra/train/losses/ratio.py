"""Importance ratios p_now / p_old, per token or per sequence.

Shape legend: N tokens, S sequences.
"""

from __future__ import annotations

from torch import Tensor

from libra.train.choice_check import check_option
from libra.train.sequences import Sequences, sequence_mean

LOG_RATIO_BOUND = 20.0
"""Largest |log ratio| exponentiated (verl's value): e^20 is finite in float32, e^89 is not. Beyond it, gradient 0."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""Largest mean log ratio of a sequence that is exponentiated (verl's value); there is no lower bound."""


def token_ratio(logp_N: Tensor, old_logp_N: Tensor, *, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
    """p_now / p_old of each token; the logarithm is clamped to [-bound, bound], None: no clamp (TRL, AReaL)."""
    log_ratio_N = logp_N - old_logp_N
    return (log_ratio_N if bound is None else log_ratio_N.clamp(-bound, bound)).exp()


def sequence_ratio(
    logp_N: Tensor,
    old_logp_N: Tensor,
    sequences: Sequences,
    *,
    gradient: str = "token",
    bound: float | None = SEQUENCE_LOG_RATIO_BOUND,
) -> Tensor:
    """Geometric mean of a sequence's token ratios, at each of its tokens (N,). GSPO, arXiv:2507.18071, eq. 7 and 14.

    Parameters
    ----------
    gradient : {"token", "sequence"}
        Path of the gradient. "token": each token's copy has the gradient of that token alone, straight-through (verl).
        "sequence": each copy has the gradient of the mean (TRL, AReaL). With one advantage per sequence and equal token
        weights, both give the same gradient of the loss.
    bound : float, optional
        The logarithm is at most this. None: not bounded (TRL, AReaL).
    """
    check_option("sequence_ratio gradient", gradient, ("token", "sequence"))
    log_ratio_S = sequence_mean(logp_N - old_logp_N, sequences)
    log_ratio_N = sequences.spread(log_ratio_S)
    if gradient == "token":
        logp_N = sequences.only(logp_N)
        log_ratio_N = logp_N - logp_N.detach() + log_ratio_N.detach()
    return (log_ratio_N if bound is None else log_ratio_N.clamp(max=bound)).exp()
