"""GSPO: the clipped surrogate on the ratio of whole sequences.

Shape legend: N tokens.
"""

from __future__ import annotations

from torch import Tensor

from libra.train.losses.clipped import clipped_surrogate
from libra.train.losses.ratio import SEQUENCE_LOG_RATIO_BOUND, sequence_ratio
from libra.train.sequences import Sequences, sequence_mean


def gspo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
    gradient: str = "token",
    mean_advantage: bool = False,
    bound: float | None = SEQUENCE_LOG_RATIO_BOUND,
) -> Tensor:
    """Loss of each token under its sequence's ratio; aggregate with ``seq-mean-token-mean``. GSPO, arXiv:2507.18071.

    Parameters
    ----------
    clip_low, clip_high, dual_clip, ratio_max
        See `libra.train.losses.clipped.clipped_surrogate`; the clip values are the paper's (sec. 5.1).
    gradient, bound
        See `libra.train.losses.ratio.sequence_ratio`.
    mean_advantage : bool
        Give every token the mean advantage of its sequence first (AReaL). No effect if it has one advantage.
    """
    if mean_advantage:
        advantage_N = sequences.spread(sequence_mean(advantage_N, sequences))
    ratio_N = sequence_ratio(logp_N, old_logp_N, sequences, gradient=gradient, bound=bound)
    return clipped_surrogate(
        ratio_N, advantage_N, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, ratio_max=ratio_max
    )
