"""Functions of verl 0.9.1, TRL 1.16.0 and AReaL 1.0.4 by Libra's: which options give their numbers (docs/sources.md).

Each takes its peer's arguments under the peer's names, in rows (B, T). verl: ``core_algos.py`` and ``rollout_corr_helper.py``;
TRL: ``GRPOTrainer._compute_loss``, one accumulation step on one process; AReaL: ``functional.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from libra.train.advantages import grpo, opo, reinforce_pp, reinforce_pp_baseline, remax, rloo
from libra.train.corrections import binary_kl_mask, importance_weights, off_policy_sequence_mask, rejection_mask
from libra.train.losses import (
    Aggregation,
    cispo_loss,
    clipped_surrogate,
    dppo_loss,
    gated_surrogate,
    gmpo_loss,
    gspo_loss,
    kl_estimate,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
    sequence_mean,
    sequence_ratio,
    token_ratio,
    vespo_loss,
    weighted_logp_loss,
)


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """`libra.train.Sequences` of padded rows: ``mask`` (B, T) is True or 1 where there is a token."""

    mask: Tensor

    @property
    def mask_N(self) -> Tensor:
        return self.mask if self.mask.dtype == torch.bool else self.mask > 0

    @property
    def count_S(self) -> Tensor:
        return self.mask_N.sum(-1)

    def only(self, value_N: Tensor) -> Tensor:
        return torch.where(self.mask_N, value_N, torch.zeros_like(value_N))

    def sum(self, value_N: Tensor) -> Tensor:
        return self.only(value_N).sum(-1)

    def largest(self, value_N: Tensor) -> Tensor:
        if not value_N.shape[-1]:
            return value_N.new_zeros(len(value_N))
        top_S = value_N.masked_fill(~self.mask_N, -torch.inf).amax(-1)
        return torch.where(self.count_S > 0, top_S, torch.zeros_like(top_S))

    def spread(self, value_S: Tensor) -> Tensor:
        return value_S[:, None].expand(self.mask.shape)


def aggregated(rule, loss_N, rows, *, num_tokens=None, num_sequences=None, count_empty=False, token_eps=0.0):
    """The loss of a minibatch. TRL counts rows without a token, verl adds 1e-8 to the count in a row's mean."""
    count_S = rows.count_S
    if token_eps and rule.mode == "seq-mean-token-mean":
        share_S = count_S / (count_S.to(loss_N.dtype) + token_eps)
        loss_N = loss_N * rows.spread(share_S)
    if num_sequences is None:
        num_sequences = len(count_S) if count_empty else int((count_S > 0).sum())
    num_tokens = int(count_S.sum()) if num_tokens is None else num_tokens
    weight = rule.weight_sum(num_tokens=num_tokens, num_sequences=num_sequences)
    return rule.weighted_sum(loss_N, rows) / rule.divisor_of(weight)


def verl_advantages(
    estimator, token_level_rewards, response_mask, *, index=None, reward_baselines=None, gamma=1.0, epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
):  # fmt: skip
    """``(advantages, returns)`` of ``compute_<estimator>_advantage``."""
    reward_B, length_B = token_level_rewards.sum(-1), response_mask.sum(-1)
    if estimator == "remax":
        return remax(token_level_rewards, reward_baselines, response_mask)
    if estimator == "reinforce_plus_plus":
        return reinforce_pp(token_level_rewards, response_mask, gamma=gamma)
    advantage_B = {
        "grpo": lambda: grpo(reward_B, index, normalize_std=norm_adv_by_std_in_grpo, eps=epsilon),
        "rloo": lambda: rloo(reward_B, index),
        "rloo_vectorized": lambda: rloo(reward_B, index, singleton="zero"),
        "opo": lambda: opo(reward_B, length_B, index),
        "reinforce_plus_plus_baseline": lambda: reinforce_pp_baseline(reward_B, length_B, index),
    }[estimator]()
    advantage_BT = advantage_B[:, None] * response_mask
    return advantage_BT, advantage_BT


def verl_agg_loss(
    loss_mat, loss_mask, loss_agg_mode, *, dp_size=1, batch_num_tokens=None, global_batch_size=None,
    loss_scale_factor=None,
):  # fmt: skip
    """``agg_loss``: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, seq-mean-token-mean."""
    if loss_agg_mode == "token-sum":
        aggregation = Aggregation("constant", divisor=1.0)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        aggregation = Aggregation(loss_agg_mode, horizon_tokens=float(loss_scale_factor or loss_mask.shape[-1]))
    else:
        aggregation = Aggregation(loss_agg_mode)
    counts = {"num_tokens": batch_num_tokens, "num_sequences": global_batch_size}
    loss = aggregated(aggregation, loss_mat, Padded(loss_mask), token_eps=1e-8, **counts)
    return loss * dp_size


def verl_policy_loss(
    loss_mode, old_log_prob, log_prob, advantages, response_mask, *, loss_agg_mode="token-mean", clip_ratio_low=0.2,
    clip_ratio_high=0.2, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05, rollout_is_weights=None, **sizes,
):  # fmt: skip
    """``compute_policy_loss_<loss_mode>``; geo_mean takes the mean over all rows and ignores ``loss_agg_mode``."""
    clip = {"clip_low": clip_ratio_low, "clip_high": clip_ratio_high}
    rows, tokens = Padded(response_mask), (log_prob, old_log_prob, advantages)
    if loss_mode == "geo_mean":
        loss_BT = gmpo_loss(*tokens, rows, **clip, token_eps=1e-8, bound=None)
        if rollout_is_weights is not None:
            log_weight_B = sequence_mean((rollout_is_weights + 1e-10).log(), rows, eps=1e-8)
            loss_BT = loss_BT * rows.spread(log_weight_B.exp())
        return aggregated(Aggregation("seq-mean-token-mean"), loss_BT, rows, count_empty=True)
    loss_BT = {
        "vanilla": lambda: ppo_loss(*tokens, **clip, dual_clip=clip_ratio_c),
        "gspo": lambda: gspo_loss(*tokens, rows, **clip),
        "cispo": lambda: cispo_loss(*tokens, **clip),
        "sapo": lambda: sapo_loss(*tokens, tau_positive=tau_pos, tau_negative=tau_neg),
        "dppo_tv": lambda: dppo_loss(*tokens, **clip, divergence="tv", ratio_max=clip_ratio_c),
        "dppo_kl": lambda: dppo_loss(*tokens, **clip, divergence="kl", ratio_max=clip_ratio_c),
        "gpg": lambda: reinforce_loss(log_prob, advantages),
    }[loss_mode]()
    if rollout_is_weights is not None:
        loss_BT = loss_BT * rollout_is_weights
    return verl_agg_loss(loss_BT, response_mask, loss_agg_mode, **sizes)


def verl_kl_penalty(logprob, ref_logprob, kl_penalty):
    """``kl_penalty``: kl or k1, abs, mse or k2, low_var_kl or k3, each with an optional trailing +."""
    name = kl_penalty.removesuffix("+")
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)
    straight = "+" * kl_penalty.endswith("+")
    return kl_estimate(logprob, ref_logprob, estimator + straight, bound=10.0 if estimator == "k3" else None)


def verl_rollout_weights(
    log_ratio, response_mask, *, rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=False
):
    """``compute_rollout_correction_weights``: one number truncates (TIS), "low_high" cuts out (IcePop)."""
    low, _, high = str(rollout_is_threshold).rpartition("_")
    bounds = {"low": float(low) if low else None, "high": float(high), "action": "mask" if low else "truncate"}
    rows = Padded(response_mask)
    return importance_weights(log_ratio, rows, level=rollout_is, normalize=rollout_is_batch_normalize, **bounds)


def verl_rejection_mask(
    log_ratio, response_mask, *, rollout_rs, rollout_rs_threshold, old_log_prob=None, rollout_log_prob=None
):
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
            keep_BT = keep_BT & binary_kl_mask(old_log_prob, rollout_log_prob, rows, high=float(threshold))
            continue
        where, metric = name.rsplit("_", 1)
        level, _, reduce = where.partition("_")
        low, _, high = threshold.rpartition("_")
        bounds = {"high": float(high)}
        if metric == "k1":  # verl bounds the logarithm of p_engine / p_trainer
            log_low, log_high = torch.tensor([float(low or 1 / float(high)), float(high)]).double().log().tolist()
            bounds = {"low": -log_high, "high": -log_low}
        options = {"level": "token" if level == "token" else "sequence", "reduce": reduce or "mean"}
        keep_BT = keep_BT & rejection_mask(log_ratio, rows, metric=metric, **options, **bounds)
    return (response_mask * keep_BT).to(response_mask.dtype)


# -------------------------------------------------------------------- TRL

TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum", "dapo": "constant", "cispo": "constant", "vespo": "constant",
}  # fmt: skip


def trl_grpo_loss(
    per_token_logps, old_per_token_logps, advantages, completion_mask, *, loss_type="dapo",
    importance_sampling_level="token", epsilon=0.2, epsilon_high=None, delta=None, beta=0.0, ref_per_token_logps=None,
    use_bias_correction_kl=False, max_completion_length=None, num_items_in_batch=None, sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, off_policy_mask_threshold=None, sampling_per_token_logps=None,
    importance_sampling_ratio=None, entropies=None, entropy_coef=0.0,
):  # fmt: skip
    """The loss, for every ``loss_type``. For cispo ``epsilon_high`` is the largest weight itself, and there is no smallest."""
    rows = Padded(completion_mask)
    advantage_BT = (advantages[:, None] if advantages.ndim == 1 else advantages).expand_as(per_token_logps)
    logps = (rows.only(per_token_logps), rows.only(old_per_token_logps))
    if importance_sampling_level == "token":
        ratio_BT = token_ratio(*logps, bound=None)
    else:
        ratio_BT = sequence_ratio(*logps, rows, gradient="sequence", bound=None)
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "vespo":
        loss_BT = vespo_loss(*logps, advantage_BT, rows, weight_N=importance_sampling_ratio)
    elif loss_type == "cispo":
        loss_BT = weighted_logp_loss(ratio_BT, logps[0], advantage_BT, clip_low=1.0, clip_high=high - 1)
    elif loss_type == "sapo":
        taus = {"tau_positive": sapo_temperature_pos, "tau_negative": sapo_temperature_neg}
        loss_BT = gated_surrogate(ratio_BT, advantage_BT, **taus)
    else:
        loss_BT = clipped_surrogate(ratio_BT, advantage_BT, clip_low=epsilon, clip_high=high, ratio_max=delta)
    if off_policy_mask_threshold is not None:
        sampling = old_per_token_logps if sampling_per_token_logps is None else sampling_per_token_logps
        tokens = (per_token_logps, sampling, advantage_BT, rows)
        loss_BT = loss_BT * off_policy_sequence_mask(*tokens, threshold=off_policy_mask_threshold)
    if importance_sampling_ratio is not None and loss_type != "vespo":
        loss_BT = loss_BT * importance_sampling_ratio
    if beta:
        kl_BT = kl_estimate(logps[0], rows.only(ref_per_token_logps), "k3")
        loss_BT = loss_BT + beta * (kl_BT * ratio_BT if use_bias_correction_kl else kl_BT)
    rule = Aggregation(
        TRL_AGGREGATIONS[loss_type],
        horizon_tokens=None if max_completion_length is None else float(max_completion_length),
        divisor=None if num_items_in_batch is None else max(1.0, float(num_items_in_batch)),
    )
    loss = aggregated(rule, loss_BT, rows, count_empty=True)
    if entropies is not None and entropy_coef:
        loss = loss - entropy_coef * aggregated(Aggregation("token-mean"), entropies, rows)
    return loss


# -------------------------------------------------------------------- AReaL

AREAL_METRICS = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3-reverse"}


def areal_rejection(
    proximal_logprobs, old_logprobs, loss_mask, *, level="token", action="mask", metric="ratio", agg="mean",
    upper=5.0, lower=None,
):  # fmt: skip
    """``apply_rejection_sampling``: the new mask, and the behaviour weights in float32. Arguments of ``RejectionSamplingConfig``.

    The metric is judged on float32 log-probabilities; a sequence's weight is its geometric mean for metric "ratio" only.
    """
    rows = Padded(loss_mask)
    log_ratio_BT = proximal_logprobs.detach().float() - old_logprobs.detach().float()
    log_ratio_BT = torch.where(torch.isfinite(log_ratio_BT), log_ratio_BT, torch.zeros_like(log_ratio_BT))
    weight_level = "geometric" if level == "sequence" and metric == "ratio" else "token"
    weight_BT = importance_weights(log_ratio_BT, rows, level=weight_level, action="none", bound=None)
    if metric == "binary_kl":
        keep_BT = binary_kl_mask(proximal_logprobs.float(), old_logprobs.float(), rows, high=upper)
    else:
        options = {"metric": AREAL_METRICS[metric], "level": level, "reduce": agg, "low": lower, "high": upper}
        keep_BT = rejection_mask(log_ratio_BT, rows, bound=None, **options)
    if action == "mask":
        return keep_BT, torch.where(keep_BT, weight_BT, torch.zeros_like(weight_BT))
    clamped_BT = weight_BT.clamp(lower or 0.0, upper)
    return rows.mask_N, rows.only(torch.where(keep_BT, weight_BT, clamped_BT))


def areal_ppo_actor_loss(
    logprobs, proximal_logprobs, old_logprobs, advantages, loss_mask, *, eps_clip=0.2, eps_clip_higher=None,
    c_clip=None, importance_sampling_level="token", rejection=None,
):  # fmt: skip
    """``ppo_actor_loss_fn``: the decoupled PPO loss, and the behaviour weights (None without ``rejection``).

    Tokens are counted before rejection. At level "sequence" the ratio is the geometric mean over the tokens that were not
    rejected, and every token gets the advantages of its row summed over *all* places, divided by that count.
    """
    num_tokens = int(Padded(loss_mask).count_S.sum())
    rows, weight_BT = Padded(loss_mask), None
    if rejection is not None:
        kept_BT, weight_BT = areal_rejection(proximal_logprobs, old_logprobs, loss_mask, **rejection)
        rows = Padded(kept_BT)
    ratio_BT, advantages = _areal_ratio(logprobs, proximal_logprobs, advantages, rows, importance_sampling_level)
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    loss_BT = clipped_surrogate(ratio_BT, advantages, clip_low=eps_clip, clip_high=high, dual_clip=c_clip)
    if weight_BT is not None:
        loss_BT = loss_BT * weight_BT
    return aggregated(Aggregation("token-mean"), loss_BT, rows, num_tokens=num_tokens), weight_BT


def _areal_ratio(logprobs, old_logprobs, advantages, rows, level):
    logps = (rows.only(logprobs), rows.only(old_logprobs))
    if level == "token":
        return token_ratio(*logps, bound=None), advantages
    mean_B = sequence_mean(advantages, rows)
    return sequence_ratio(*logps, rows, gradient="sequence", bound=None), rows.spread(mean_B)
