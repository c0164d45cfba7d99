"""verl 0.9.1 (``verl/trainer/ppo/core_algos.py``, ``rollout_corr_helper.py``).

Shape legend: B rows, T places of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from libra.errors import TrainError
from libra.train.advantages import gae, grpo, opo, reinforce_pp, reinforce_pp_baseline, remax, reward_to_go, rloo
from libra.train.aggregation import Aggregation
from libra.train.corrections import binary_kl_mask, importance_weights, rejection_mask
from libra.train.kl import kl_estimate
from libra.train.losses import (
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
    value_clipped,
    value_loss,
)
from libra.train.sequences import Padded, sequence_mean

_KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def verl_advantages(
    estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Tensor | None = None,
    values: Tensor | None = None,
    reward_baselines: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """``(advantages, returns)`` of ``compute_<estimator>_advantage``: grpo, grpo_vectorized, rloo, rloo_vectorized, opo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, remax, gae.
    """
    reward_B = token_level_rewards.sum(-1)
    length_B = response_mask.sum(-1)
    if estimator == "gae":
        assert values is not None
        return gae(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    if estimator == "remax":
        assert reward_baselines is not None
        return remax(token_level_rewards, reward_baselines, response_mask)
    if estimator == "reinforce_plus_plus":
        return reinforce_pp(token_level_rewards, response_mask, gamma=gamma)
    assert index is not None
    if estimator in ("grpo", "grpo_vectorized"):
        advantage_B = grpo(reward_B, index, normalize_std=norm_adv_by_std_in_grpo, eps=epsilon)
    elif estimator == "rloo":
        advantage_B = rloo(reward_B, index)
    elif estimator == "rloo_vectorized":
        advantage_B = rloo(reward_B, index, singleton="zero")
    elif estimator == "opo":
        advantage_B = opo(reward_B, length_B, index)
    elif estimator == "reinforce_plus_plus_baseline":
        advantage_B = reinforce_pp_baseline(reward_B, length_B, index)
    else:
        raise TrainError(f"verl_advantages: unknown estimator {estimator!r}; allowed are those of the docstring")
    advantage_BT = advantage_B[:, None] * response_mask
    return advantage_BT, advantage_BT


def verl_agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """``agg_loss``: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, seq-mean-token-mean."""
    if loss_agg_mode == "token-sum":
        aggregation = Aggregation("constant", divisor=1.0)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        aggregation = Aggregation(loss_agg_mode, horizon_tokens=float(loss_scale_factor or loss_mask.shape[-1]))
    else:
        aggregation = Aggregation(loss_agg_mode, token_eps=1e-8)
    loss = aggregation(loss_mat, Padded(loss_mask), num_tokens=batch_num_tokens, num_sequences=global_batch_size)
    return loss * dp_size


def verl_policy_loss(
    loss_mode: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Any,
) -> Tensor:
    """``compute_policy_loss_<loss_mode>``: vanilla, gspo, cispo, sapo, geo_mean, dppo_tv, dppo_kl, gpg.

    geo_mean takes the mean over all rows and ignores ``loss_agg_mode``. gspo uses the mode (releases before 0.9 ignored it,
    and always took seq-mean-token-mean).
    """
    clip: dict[str, Any] = {"clip_low": clip_ratio_low, "clip_high": clip_ratio_high}
    rows = Padded(response_mask)
    tokens = (log_prob, old_log_prob, advantages)
    if loss_mode == "geo_mean":
        loss_BT = gmpo_loss(*tokens, rows, **clip, token_eps=1e-8, bound=None)
        if rollout_is_weights is not None:
            log_weight_B = sequence_mean((rollout_is_weights + 1e-10).log(), rows, eps=1e-8)
            loss_BT = loss_BT * rows.spread(log_weight_B.exp())
        return Aggregation("seq-mean-token-mean", count_empty=True)(loss_BT, rows)
    if loss_mode == "vanilla":
        loss_BT = ppo_loss(*tokens, **clip, dual_clip=clip_ratio_c)
    elif loss_mode == "gspo":
        loss_BT = gspo_loss(*tokens, rows, **clip)
    elif loss_mode == "cispo":
        loss_BT = cispo_loss(*tokens, **clip)
    elif loss_mode == "sapo":
        loss_BT = sapo_loss(*tokens, tau_positive=tau_pos, tau_negative=tau_neg)
    elif loss_mode in ("dppo_tv", "dppo_kl"):
        loss_BT = dppo_loss(*tokens, **clip, divergence=loss_mode.removeprefix("dppo_"), ratio_max=clip_ratio_c)
    elif loss_mode == "gpg":
        loss_BT = reinforce_loss(log_prob, advantages)
    else:
        raise TrainError(f"verl_policy_loss: unknown loss_mode {loss_mode!r}; allowed are those of the docstring")
    if rollout_is_weights is not None:
        loss_BT = loss_BT * rollout_is_weights
    return verl_agg_loss(loss_BT, response_mask, loss_agg_mode, **global_batch_info)


def verl_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: Any,
) -> tuple[Tensor, Tensor]:
    """``compute_value_loss``: the loss and the share of clipped tokens."""
    loss = verl_agg_loss(
        value_loss(vpreds, values, returns, clip=cliprange_value), response_mask, loss_agg_mode, **global_batch_info
    )
    clipped_BT = value_clipped(vpreds, values, returns, clip=cliprange_value).to(vpreds.dtype)
    return loss, (clipped_BT * response_mask).sum() / (response_mask.sum() + 1e-8)


def verl_kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """``kl_penalty``: kl or k1, abs, mse or k2, low_var_kl or k3, each with an optional trailing +."""
    name = kl_penalty.removesuffix("+")
    estimator = _KL_NAMES.get(name, name)
    bounds = {"bound": 10.0, "log_ratio_bound": 20.0} if estimator == "k3" else {}
    return kl_estimate(logprob, ref_logprob, estimator + "+" * kl_penalty.endswith("+"), **bounds)


def verl_rollout_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> Tensor:
    """``compute_rollout_correction_weights``: one number truncates (TIS), "low_high" cuts out (IcePop)."""
    low, _, high = str(rollout_is_threshold).rpartition("_")
    return importance_weights(
        log_ratio,
        Padded(response_mask),
        level=rollout_is,
        action="mask" if low else "truncate",
        low=float(low) if low else None,
        high=float(high),
        normalize=rollout_is_batch_normalize,
    )


def verl_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_rs: str,
    rollout_rs_threshold: str | float,
    old_log_prob: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
) -> Tensor:
    """``compute_rollout_rejection_mask``: the new mask, for token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3, binary_kl.

    Comma-separated options must all keep a token. For k1 the threshold is "low_high" or "high" (low = 1 / high), bounds of
    the *inverse* ratio.
    """
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",")))
    thresholds = [part.strip() for part in str(rollout_rs_threshold).split(",")]
    thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
    rows = Padded(response_mask)
    keep_BT = rows.mask_N
    for name, threshold in zip(names, thresholds, strict=True):
        if name == "binary_kl":
            assert old_log_prob is not None
            assert rollout_log_prob is not None
            keep_BT = keep_BT & binary_kl_mask(old_log_prob, rollout_log_prob, rows, high=float(threshold))
            continue
        where, metric = name.rsplit("_", 1)
        level, _, reduce = where.partition("_")
        bounds: dict[str, Any] = {"high": float(threshold.rpartition("_")[2])}
        if metric == "k1":  # verl bounds the logarithm of p_engine / p_trainer
            low, _, high = threshold.rpartition("_")
            log_high, log_low = (
                torch.tensor(float(high)).double().log(),
                torch.tensor(float(low or 1 / float(high))).double().log(),
            )
            bounds = {"low": -float(log_high), "high": -float(log_low)}
        keep_BT = keep_BT & rejection_mask(
            log_ratio,
            rows,
            metric=metric,
            level="token" if level == "token" else "sequence",
            reduce=reduce or "mean",
            **bounds,
        )
    return (response_mask * keep_BT).to(response_mask.dtype)


__all__ = [
    "reward_to_go",
    "verl_advantages",
    "verl_agg_loss",
    "verl_kl_penalty",
    "verl_policy_loss",
    "verl_rejection_mask",
    "verl_rollout_weights",
    "verl_value_loss",
]
