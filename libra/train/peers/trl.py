"""TRL 1.16.0 (``GRPOTrainer._compute_loss``), one accumulation step on one process.

Shape legend: B rows, T places of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.errors import TrainError
from libra.train.aggregation import Aggregation
from libra.train.choice_check import check_option
from libra.train.corrections import importance_weights, off_policy_sequence_mask
from libra.train.kl import kl_estimate
from libra.train.losses import (
    clipped_surrogate,
    gated_surrogate,
    sequence_ratio,
    token_ratio,
    vespo_loss,
    weighted_logp_loss,
)
from libra.train.sequences import Padded

_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "dapo": "constant",
    "cispo": "constant",
    "vespo": "constant",
}


def trl_grpo_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    ref_per_token_logps: Tensor | None = None,
    use_bias_correction_kl: bool = False,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    off_policy_mask_threshold: float | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """The loss, for every ``loss_type``: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo.

    For cispo ``epsilon_high`` is the largest weight itself, and there is no smallest. ``top_entropy_quantile`` and the
    adaptive entropy coefficient are not reproduced.
    """
    check_option("trl_grpo_loss loss_type", loss_type, _AGGREGATIONS)
    check_option("trl_grpo_loss importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    rows = Padded(completion_mask)
    advantage_BT = (advantages[:, None] if advantages.ndim == 1 else advantages).expand_as(per_token_logps)
    logps = (rows.only(per_token_logps), rows.only(old_per_token_logps))
    if importance_sampling_level == "token":
        ratio_BT = token_ratio(*logps, bound=None)
    else:
        ratio_BT = sequence_ratio(*logps, rows, gradient="sequence", bound=None)
    if loss_type == "vespo":
        loss_BT = vespo_loss(*logps, advantage_BT, rows, weight_N=importance_sampling_ratio)
    else:
        high = epsilon if epsilon_high is None else epsilon_high
        taus = (sapo_temperature_pos, sapo_temperature_neg)
        loss_BT = _surrogate(loss_type, ratio_BT, logps[0], advantage_BT, (epsilon, high, delta), taus)
    if off_policy_mask_threshold is not None:
        sampling = old_per_token_logps if sampling_per_token_logps is None else sampling_per_token_logps
        tokens = (per_token_logps, sampling, advantage_BT, rows)
        loss_BT = loss_BT * off_policy_sequence_mask(*tokens, threshold=off_policy_mask_threshold)
    if importance_sampling_ratio is not None and loss_type != "vespo":
        loss_BT = loss_BT * importance_sampling_ratio
    if beta:
        if ref_per_token_logps is None:
            raise TrainError(f"trl_grpo_loss: beta is {beta} but ref_per_token_logps is None; give it, or beta=0")
        kl_BT = kl_estimate(logps[0], rows.only(ref_per_token_logps), "k3")
        loss_BT = loss_BT + beta * (kl_BT * ratio_BT if use_bias_correction_kl else kl_BT)
    loss = _aggregation(loss_type, max_completion_length, num_items_in_batch)(loss_BT, rows)
    if entropies is not None and entropy_coef:
        loss = loss - entropy_coef * Aggregation("token-mean")(entropies, rows)
    return loss


def _surrogate(
    loss_type: str,
    ratio_BT: Tensor,
    logp_BT: Tensor,
    advantage_BT: Tensor,
    clip: tuple[float, float, float | None],
    taus: tuple[float, float],
) -> Tensor:
    """The policy loss of each token (B, T), but vespo's; ``clip``: low, high, delta."""
    low, high, delta = clip
    if loss_type == "cispo":
        return weighted_logp_loss(ratio_BT, logp_BT, advantage_BT, clip_low=1.0, clip_high=high - 1)
    if loss_type == "sapo":
        return gated_surrogate(ratio_BT, advantage_BT, tau_positive=taus[0], tau_negative=taus[1])
    return clipped_surrogate(ratio_BT, advantage_BT, clip_low=low, clip_high=high, ratio_max=delta)


def _aggregation(loss_type: str, horizon: int | None, num_items: float | None) -> Aggregation:
    return Aggregation(
        _AGGREGATIONS[loss_type],
        horizon_tokens=None if horizon is None else float(horizon),
        divisor=None if num_items is None else max(1.0, float(num_items)),
        count_empty=True,
    )


def trl_sampling_weights(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """``importance_sampling_ratio``: token_truncate, token_mask, sequence_truncate, sequence_mask; 1 where the engine gave NaN.

    Masked places are 0 here; TRL has 1 there and multiplies by the mask later.
    """
    level, _, action = mode.partition("_")
    log_ratio_BT = torch.nan_to_num(old_per_token_logps - sampling_per_token_logps, nan=0.0)
    return importance_weights(
        log_ratio_BT, Padded(completion_mask), level=level, action=action, low=clip_min, high=clip_max, bound=None
    )
