"""Policy and value losses, each with one loss per token; `libra.train.aggregation` reduces them to one number.

All take log-probabilities in nats, of which only ``logp_N`` carries a gradient. Those that use whole sequences also take a
`libra.train.sequences.Sequences`; the others work in any arrangement.
"""

from __future__ import annotations

from libra.train.losses.cispo import cispo_loss, weighted_logp_loss
from libra.train.losses.clipped import clip_sums, clipped_surrogate, ppo_loss
from libra.train.losses.distillation import sampled_divergence, top_k_divergence
from libra.train.losses.dppo import dppo_keep, dppo_loss
from libra.train.losses.gmpo import gmpo_loss
from libra.train.losses.gspo import gspo_loss
from libra.train.losses.ratio import sequence_ratio, token_ratio
from libra.train.losses.reinforce import reinforce_loss, vespo_loss
from libra.train.losses.sapo import gated_surrogate, sapo_loss
from libra.train.losses.value import value_clipped, value_loss

__all__ = [
    "cispo_loss",
    "clip_sums",
    "clipped_surrogate",
    "dppo_keep",
    "dppo_loss",
    "gated_surrogate",
    "gmpo_loss",
    "gspo_loss",
    "ppo_loss",
    "reinforce_loss",
    "sampled_divergence",
    "sapo_loss",
    "sequence_ratio",
    "token_ratio",
    "top_k_divergence",
    "value_clipped",
    "value_loss",
    "vespo_loss",
    "weighted_logp_loss",
]
