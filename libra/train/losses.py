"""Policy losses, each one number per token; `libra.train.sequences.Aggregation` makes them a
minibatch's loss.

All take log-probabilities in nats, of which only ``logp_N`` carries a gradient; ``old_logp_N`` is
in the denominator of the ratio. Losses on whole sequences also take a
`libra.train.sequences.Sequences`.

Shape legend: N action tokens, S sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from libra.train.sequences import Sequences, check_option, sequence_mean

LOG_RATIO_BOUND = 20.0
"""Largest |log ratio| exponentiated (verl's value): e^20 is finite in float32, e^89 is not. Beyond it, gradient 0."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""Largest mean log ratio of a sequence that is exponentiated (verl's value); there is no lower bound."""


def token_ratio(logp_N: Tensor, old_logp_N: Tensor, *, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
    """p_now / p_old of each token; the logarithm is clamped to [-bound, bound] (no clamp in TRL, AReaL)."""
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
    """Geometric mean of a sequence's token ratios, at each of its tokens (N,). GSPO, arXiv:2507.18071, eq.
    7, 14.

    With ``gradient="token"`` each token's copy has the gradient of that token alone, straight-through
    (verl); with "sequence" the gradient of the mean (TRL, AReaL). With one advantage per sequence and
    equal token weights the gradient of the loss is the same. The logarithm is at most ``bound``
    (unbounded in TRL, AReaL).
    """
    check_option("sequence_ratio gradient", gradient, ("token", "sequence"))
    log_ratio_S = sequence_mean(logp_N - old_logp_N, sequences)
    log_ratio_N = sequences.spread(log_ratio_S)
    if gradient == "token":
        logp_N = sequences.only(logp_N)
        log_ratio_N = logp_N - logp_N.detach() + log_ratio_N.detach()
    return (log_ratio_N if bound is None else log_ratio_N.clamp(max=bound)).exp()


def clipped_surrogate(
    ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
) -> Tensor:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` for a ratio of any level, with gradient
    through it.

    Ratios below ``1 - clip_low`` (A < 0) or above ``1 + clip_high`` (A > 0) get no gradient. For A < 0
    the loss is at most ``-A * dual_clip`` (> 1), arXiv:1912.09729. The unclipped ratio is at most
    ``ratio_max``, for both signs (two-sided GRPO, INTELLECT-2 arXiv:2505.07291; TRL's delta).
    """
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max)
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)
    if dual_clip is None:
        return loss_N
    return torch.where(advantage_N < 0, torch.minimum(-advantage_N * dual_clip, loss_N), loss_N)


def ppo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """PPO's pessimistic surrogate (arXiv:1707.06347) with separate bounds, clip-higher from DAPO
    (arXiv:2503.14476).

    See `clipped_surrogate` for the clips and `token_ratio` for ``bound``.
    """
    return clipped_surrogate(
        token_ratio(logp_N, old_logp_N, bound=bound),
        advantage_N,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_max=ratio_max,
    )


@torch.no_grad()
def clip_sums(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Sums for a report (ratio, clipped tokens, k3 from the old policy), and the largest ratio; scalars."""
    log_ratio_N = (logp_N - old_logp_N).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = log_ratio_N.exp()
    return {
        "ratio_sum": ratio_N.sum(),
        "ratio_max": ratio_N.max() if ratio_N.numel() else ratio_N.sum(),
        "clipped_low": ((advantage_N < 0) & (ratio_N < 1 - clip_low)).sum(),
        "clipped_high": ((advantage_N > 0) & (ratio_N > 1 + clip_high)).sum(),
        "kl_sum": (ratio_N - 1 - log_ratio_N).sum(),
    }


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
    bound: float | None = SEQUENCE_LOG_RATIO_BOUND,
) -> Tensor:
    """Loss of each token under its sequence's ratio; aggregate with ``seq-mean-token-mean``. GSPO,
    arXiv:2507.18071.

    Clips as in `clipped_surrogate`, with the paper's values (sec. 5.1); the rest as in
    `sequence_ratio`.
    """
    ratio_N = sequence_ratio(logp_N, old_logp_N, sequences, gradient=gradient, bound=bound)
    return clipped_surrogate(
        ratio_N, advantage_N, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, ratio_max=ratio_max
    )


def cispo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p``. CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4
    and 5.

    ``clip_low=1`` leaves the ratio unbounded below, as in the paper. The paper prints no upper bound;
    TRL and AReaL recommend 5 (``epsilon_high=5.0``, ``eps_clip_higher=4.0``).
    """
    return weighted_logp_loss(
        token_ratio(logp_N, old_logp_N, bound=bound), logp_N, advantage_N, clip_low=clip_low, clip_high=clip_high
    )


def weighted_logp_loss(
    ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """CISPO's loss for a ratio of any level."""
    return -ratio_N.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_N * logp_N


def gated_surrogate(
    ratio_N: Tensor, advantage_N: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """``-A (4 / tau) sigmoid(tau (r - 1))`` for a ratio of any level, tau by the sign of A (0 is
    negative)."""
    positive, negative = (torch.as_tensor(tau, dtype=ratio_N.dtype) for tau in (tau_positive, tau_negative))
    tau_N = torch.where(advantage_N > 0, positive, negative)
    return -(torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N) * advantage_N


def sapo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """Loss of each token; aggregate with ``seq-mean-token-mean``. SAPO, arXiv:2511.20347, the paper's
    temperatures.

    The gradient at r = 1 is PPO's; it decays as r moves away from 1, faster for a higher ``tau``.
    """
    return gated_surrogate(
        token_ratio(logp_N, old_logp_N, bound=bound), advantage_N, tau_positive=tau_positive, tau_negative=tau_negative
    )


def gmpo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    token_eps: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-mean(A) exp(mean(clipped log r))`` of a sequence, at each of its tokens. GMPO, arXiv:2507.20673.

    Aggregated with ``seq-mean-token-mean`` this is the mean over sequences. A token's log ratio is
    clipped to [-clip_low, clip_high] if that makes the objective smaller, as in PPO; the paper's range
    is (e^-0.4, e^0.4). ``token_eps`` is added to the token counts of the means (verl: 1e-8). Log ratios
    are first clamped to [-bound, bound], because for A < 0 nothing else bounds a large one (verl has no
    clamp).
    """
    sign_N = torch.sign(advantage_N)
    log_ratio_N = logp_N - old_logp_N
    if bound is not None:
        log_ratio_N = log_ratio_N.clamp(-bound, bound)
    clipped_N = log_ratio_N.clamp(-clip_low, clip_high)
    pessimistic_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clipped_N)
    ratio_S = sequence_mean(pessimistic_N, sequences, eps=token_eps).exp()
    advantage_S = sequence_mean(advantage_N, sequences, eps=token_eps)
    return sequences.spread(-advantage_S * ratio_S)


@torch.no_grad()
def dppo_keep(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    divergence: str = "tv",
) -> Tensor:
    """Whether a token keeps its gradient (N,) bool. DPPO, arXiv:2602.04879.

    ``low`` bounds the divergence for A <= 0, ``high`` for A > 0. It belongs to the two outcomes "this
    token or another": total variation |p_now - p_old| ("tv"; prime-rl, verl's ``dppo_tv``), or KL(p_old
    | p_now) ("kl"), bounded only in the direction of the advantage (verl's ``dppo_kl``).
    """
    check_option("dppo divergence", divergence, ("tv", "kl"))
    now_N, old_N = logp_N.exp(), old_logp_N.exp()
    if divergence == "tv":
        return torch.where(advantage_N > 0, now_N - old_N <= high, now_N - old_N >= -low)
    other = ((1 - old_N + 1e-8) / (1 - now_N + 1e-8)).log()
    kl_N = old_N * (old_logp_N - logp_N) + (1 - old_N) * other
    return torch.where(advantage_N > 0, (kl_N <= high) | (now_N <= old_N), (kl_N <= low) | (now_N >= old_N))


def dppo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    divergence: str = "tv",
    log_ratio_coef: float = 0.0,
    ratio_max: float | None = None,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-A r`` where `dppo_keep`, plus ``log_ratio_coef * (log r)^2`` at every token (prime-rl: 1e-3).

    With ``ratio_max`` the ratio is truncated and the gradient goes through log p alone: ``-A
    stop(min(r, ratio_max)) log p`` (verl: 20). Without it the gradient goes through r (prime-rl).
    """
    keep_N = dppo_keep(logp_N, old_logp_N, advantage_N, low=clip_low, high=clip_high, divergence=divergence)
    ratio_N = token_ratio(logp_N, old_logp_N, bound=bound)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max).detach() * logp_N
    loss_N = torch.where(keep_N, -advantage_N * ratio_N, torch.zeros_like(ratio_N))
    if log_ratio_coef:
        loss_N = loss_N + log_ratio_coef * (logp_N - old_logp_N).square()
    return loss_N


def reinforce_loss(logp_N: Tensor, advantage_N: Tensor, *, weight_N: Tensor | None = None) -> Tensor:
    """``-A log p``, times a weight without gradient if one is given (Williams 1992; verl's ``gpg``,
    ``reinforce``).

    Unbiased only on samples of the current policy, or with importance weights.
    """
    loss_N = -advantage_N * logp_N
    return loss_N if weight_N is None else loss_N * weight_N.detach()


def vespo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    weight_N: Tensor | None = None,
) -> Tensor:
    """``-phi(w) A log p`` with ``phi(w) = e^lambda w^k e^(-lambda w)``, w the sequence's ratio. VESPO,
    arXiv:2602.10693.

    As in TRL 1.16 (``loss_type="vespo"``), token log ratios are clamped to +-20 and the sequence's to
    [log 1e-8, 20], A >= 0 counts as positive, and phi has no gradient. ``weight_N`` are importance
    weights of engine against trainer, which enter w.
    """
    floor = math.log(1e-8)
    with torch.no_grad():
        log_w_S = sequences.sum((logp_N - old_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        if weight_N is not None:
            log_w_S = log_w_S + sequences.sum(weight_N.log().clamp(floor, LOG_RATIO_BOUND))
        log_w_N = sequences.spread(log_w_S.clamp(floor, LOG_RATIO_BOUND))
        positive_N = advantage_N >= 0
        k_N = torch.where(positive_N, k_positive, k_negative).to(logp_N.dtype)
        lambda_N = torch.where(positive_N, lambda_positive, lambda_negative).to(logp_N.dtype).clamp(min=1e-4)
        phi_N = (lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()).exp()
    return reinforce_loss(logp_N, advantage_N, weight_N=phi_N)
