"""The two factors of an importance ratio: engines that compute differently (mismatch), and weights that have changed (staleness).

``log p_now - log p_engine = (log p_now - log p_old) + (log p_old - log p_engine)``: *staleness* plus *mismatch*, where
``p_old`` is the trainer's own probability under the weights that generated the token. It is exact only where the trainer
has computed it (coverage); elsewhere the split is unknown, and everything counts as staleness.

Shape legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from libra.train.corrections.importance import effective_sample_frac, importance_weights
from libra.train.losses.ratio import LOG_RATIO_BOUND
from libra.train.sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class TwoFactors:
    """The split of each token's log ratio, without gradient."""

    old_logp_N: Tensor  # of the clipped ratio: the trainer's log-probability where exact, else the engine's
    mismatch_N: Tensor  # log p_old - log p_engine where exact, else 0
    exact_N: Tensor  # bool


@torch.no_grad()
def two_factors(old_logp_N: Tensor, engine_logp_N: Tensor, exact_N: Tensor) -> TwoFactors:
    """The split, from the trainer's and the engine's log-probabilities under the weights that generated each token.

    ``old_logp_N`` is read only where ``exact_N`` is True; elsewhere it may be NaN.
    """
    old_N = torch.where(exact_N, old_logp_N, engine_logp_N)
    return TwoFactors(old_N, old_N - engine_logp_N, exact_N)


@torch.no_grad()
def two_factor_metrics(
    logp_N: Tensor,
    factors: TwoFactors,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    mismatch_low: float | None = None,
    mismatch_high: float | None = 2.0,
) -> dict[str, float]:
    """Shares of tokens: staleness ratio outside its clip range, mismatch ratio outside its bounds, exact old log-probability.

    With them ``effective_sample_frac``, of the truncated mismatch weights.
    """
    count = max(1, int(sequences.count_S.sum()))

    def share(what_N: Tensor) -> float:
        return int((what_N & sequences.mask_N).sum()) / count

    stale_N = sequences.only(logp_N - factors.old_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    mismatch_N = sequences.only(factors.mismatch_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    outside_N = torch.zeros_like(factors.exact_N)
    if mismatch_low is not None:
        outside_N = outside_N | (mismatch_N < mismatch_low)
    if mismatch_high is not None:
        outside_N = outside_N | (mismatch_N > mismatch_high)
    weight_N = importance_weights(factors.mismatch_N, sequences, low=mismatch_low, high=mismatch_high)
    return {
        "staleness_clip_frac": share((stale_N < 1 - clip_low) | (stale_N > 1 + clip_high)),
        "mismatch_clip_frac": share(outside_N),
        "exact_old_frac": share(factors.exact_N),
        "effective_sample_frac": effective_sample_frac(weight_N, sequences),
    }
