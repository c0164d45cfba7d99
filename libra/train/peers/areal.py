"""AReaL 1.0.4 (``areal/utils/functional/functional.py``), padded inputs.

Shape legend: B rows, T places of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.aggregation import Aggregation
from libra.train.choice_check import check_option
from libra.train.corrections import binary_kl_mask, importance_weights, rejection_mask
from libra.train.losses import clipped_surrogate, gated_surrogate, sequence_ratio, token_ratio
from libra.train.sequences import Padded, sequence_mean

_METRICS = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3-reverse"}


def areal_rejection(
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``apply_rejection_sampling``: the new mask, and the behaviour weights in float32. Arguments of ``RejectionSamplingConfig``.

    The metric is judged on float32 log-probabilities; a sequence's weight is its geometric mean for metric "ratio" only.
    """
    check_option("areal_rejection action", action, ("mask", "clamp"))
    check_option("areal_rejection metric", metric, (*_METRICS, "binary_kl"))
    rows = Padded(loss_mask)
    log_ratio_BT = proximal_logprobs.detach().float() - old_logprobs.detach().float()
    log_ratio_BT = torch.where(torch.isfinite(log_ratio_BT), log_ratio_BT, torch.zeros_like(log_ratio_BT))
    weight_level = "geometric" if level == "sequence" and metric == "ratio" else "token"
    weight_BT = importance_weights(log_ratio_BT, rows, level=weight_level, action="none", bound=None)
    if metric == "binary_kl":
        keep_BT = binary_kl_mask(proximal_logprobs.float(), old_logprobs.float(), rows, high=upper)
    else:
        keep_BT = rejection_mask(
            log_ratio_BT, rows, metric=_METRICS[metric], level=level, reduce=agg, low=lower, high=upper, bound=None
        )
    if action == "mask":
        return keep_BT, torch.where(keep_BT, weight_BT, torch.zeros_like(weight_BT))
    clamped_BT = weight_BT.clamp(lower or 0.0, upper)
    return rows.mask_N, rows.only(torch.where(keep_BT, weight_BT, clamped_BT))


def areal_ppo_actor_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    importance_sampling_level: str = "token",
    rejection: dict[str, object] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``ppo_actor_loss_fn``: the decoupled PPO loss, and the behaviour weights (None without ``rejection``).

    Tokens are counted before rejection. At level "sequence" the ratio is the geometric mean over the tokens that were not
    rejected, and every token gets the advantages of its row summed over *all* places, divided by that count.
    """
    check_option("areal_ppo_actor_loss importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    num_tokens = int(Padded(loss_mask).count_S.sum())
    rows, weight_BT = Padded(loss_mask), None
    if rejection is not None:
        kept_BT, weight_BT = areal_rejection(proximal_logprobs, old_logprobs, loss_mask, **rejection)  # type: ignore[arg-type]
        rows = Padded(kept_BT)
    ratio_BT, advantages = _ratio(logprobs, proximal_logprobs, advantages, rows, importance_sampling_level)
    loss_BT = clipped_surrogate(
        ratio_BT,
        advantages,
        clip_low=eps_clip,
        clip_high=eps_clip if eps_clip_higher is None else eps_clip_higher,
        dual_clip=c_clip,
    )
    if weight_BT is not None:
        loss_BT = loss_BT * weight_BT
    return Aggregation("token-mean")(loss_BT, rows, num_tokens=num_tokens), weight_BT


def areal_sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    importance_sampling_level: str = "token",
) -> Tensor:
    """``sapo_loss_fn``: token-mean, at either level."""
    rows = Padded(loss_mask)
    ratio_BT, advantages = _ratio(logprobs, old_logprobs, advantages, rows, importance_sampling_level)
    loss_BT = gated_surrogate(ratio_BT, advantages, tau_positive=tau_pos, tau_negative=tau_neg)
    return Aggregation("token-mean")(loss_BT, rows)


def _ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Padded, level: str
) -> tuple[Tensor, Tensor]:
    logps = (rows.only(logprobs), rows.only(old_logprobs))
    if level == "token":
        return token_ratio(*logps, bound=None), advantages
    mean_B = sequence_mean(advantages, rows)
    return sequence_ratio(*logps, rows, gradient="sequence", bound=None), rows.spread(mean_B)
