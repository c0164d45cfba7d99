"""Token losses and divergences, the sequences of tokens, and the loss of a minibatch.

Log-probabilities are in nats; only ``logp_N`` carries a gradient, and ``old_logp_N`` is the
denominator of the ratio. Functions read the mask of a `Sequences`, so tests can pass padded rows.

Shape legend: N action tokens, S sequences, K columns (tokens of the vocabulary), O = K + 1.

1. A token's weight depends on its own sequence, the denominator of `Aggregation` on counts of the
   whole minibatch: the sum over any split into whole sequences, divided once, is the loss of one
   big batch, gradient included.
2. Masked places are ignored, even NaN; a minibatch without a token gives exactly 0.
3. Sums of weights over whole sequences add up without rounding, so parts are merged undivided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from libra.config.algorithms import AggregationMode, KLEstimator
from libra.config.task_sections import KLDirection
from libra.errors import TrainError

LOG_RATIO_BOUND = 20.0
"""Largest |log ratio| exponentiated (as in verl; e^89 overflows float32). The gradient beyond the
bound is 0."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""Largest mean log ratio of a sequence that is exponentiated (as in verl); there is no lower
bound."""
KL_BOUND = 10.0
"""Bound of a token's KL estimate in a step, in nats (verl, slime and OpenRLHF for k3)."""
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
AGGREGATIONS: tuple[str, ...] = (*get_args(AggregationMode), "constant")
_MOST_CHANGE = 0.2


def check_option(where: str, got: str, allowed: Iterable[str]) -> None:
    """TrainError naming ``where`` unless ``got`` is one of ``allowed``."""
    names = tuple(allowed)
    if got not in names:
        raise TrainError(f"{where}: got {got!r}; allowed are {', '.join(names)}")


# -------------------------------------------------------------------- sequences


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """S sequences without padding; ``sequence`` int64 (N,) is each token's sequence."""

    sequence: Tensor
    num_sequences: int

    @property
    def mask_N(self) -> Tensor:
        """True where there is a token: everywhere."""
        return torch.ones_like(self.sequence, dtype=torch.bool)

    @property
    def count_S(self) -> Tensor:
        """Tokens of each sequence, int64."""
        return self.sequence.new_zeros(self.num_sequences).index_add(0, self.sequence, torch.ones_like(self.sequence))

    def only(self, value_N: Tensor) -> Tensor:
        """``value_N``; with padding (in tests only), 0 in masked places."""
        return value_N

    def sum(self, value_N: Tensor) -> Tensor:
        """Sum over the tokens of each sequence (S,)."""
        return value_N.new_zeros(self.num_sequences).index_add(0, self.sequence, value_N)

    def largest(self, value_N: Tensor) -> Tensor:
        """Largest value in each sequence (S,); 0 for an empty sequence."""
        start_S = value_N.new_full((self.num_sequences,), -torch.inf)
        top_S = start_S.scatter_reduce(0, self.sequence, value_N, "amax")
        return torch.where(self.count_S > 0, top_S, torch.zeros_like(top_S))

    def spread(self, value_S: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens (N,)."""
        return value_S[self.sequence]


def sequence_mean(value_N: Tensor, sequences: Sequences, *, eps: float | None = None) -> Tensor:
    """Mean over the tokens of each sequence (S,); 0 for an empty sequence. The divisor is
    max(tokens, 1) (TRL, AReaL, verl's GSPO), or tokens + eps (verl's GMPO)."""
    total_S = sequences.sum(value_N)
    if eps is None:
        return total_S / sequences.count_S.clamp(min=1)
    return total_S / (sequences.count_S.to(total_S.dtype) + eps)  # an integer plus 1e-8 would be rounded in float32


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The rule by which token losses become the loss of a minibatch.

    ``horizon_tokens`` is the generation budget, the same for every batch.

    ==========================  =====================  =======================================================
    mode                        weight of a token      denominator
    ==========================  =====================  =======================================================
    ``token-mean``              1                      tokens (DAPO; TRL ``bnpo``)
    ``seq-mean-token-sum``      1                      sequences (TRL ``luspo``)
    ``seq-mean-token-mean``     1 / its sequence's     sequences (GRPO; TRL ``grpo``, ``sapo``)
                                tokens
    ``seq-mean-token-sum-norm`` 1                      sequences x ``horizon_tokens`` (Dr.GRPO; TRL ``dr_grpo``)
    ``constant``                1                      ``divisor`` (TRL ``dapo``, ``cispo``: items in the batch)
    ==========================  =====================  =======================================================
    """

    mode: str = "token-mean"
    horizon_tokens: float | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        check_option("aggregation", self.mode, AGGREGATIONS)
        needed = {"seq-mean-token-sum-norm": "horizon_tokens", "constant": "divisor"}.get(self.mode)
        if needed is not None and not (getattr(self, needed) or 0) > 0:
            raise TrainError(f"aggregation {self.mode}: {needed} is {getattr(self, needed)}; give a number above 0")

    def weighted_sum(self, loss_N: Tensor, sequences: Sequences) -> Tensor:
        """Sum of weight x loss, a scalar with gradient."""
        total_S = sequences.sum(loss_N)
        if self.mode == "seq-mean-token-mean":
            total_S = total_S / sequences.count_S.clamp(min=1)
        return total_S.sum()

    def weight_sum(self, *, num_tokens: float, num_sequences: float) -> float:
        """Sum of weights of sequences with these counts, a whole number."""
        return num_tokens if self.mode == "token-mean" else num_sequences

    def divisor_of(self, weight_sum: float) -> float:
        """The divisor of the merged sum of weight x gradient; a count of 0 becomes 1."""
        if self.mode == "constant":
            assert self.divisor is not None
            return self.divisor
        horizon = self.horizon_tokens if self.mode == "seq-mean-token-sum-norm" else None
        return (weight_sum or 1.0) * (horizon or 1.0)


# -------------------------------------------------------------------- ratios, and losses of a ratio of any level


def token_ratio(logp_N: Tensor, old_logp_N: Tensor, *, bound: float | None = LOG_RATIO_BOUND) -> Tensor:
    """p_now / p_old of each token; the logarithm is clamped to +-bound (not in TRL, AReaL)."""
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
    """Geometric mean of a sequence's token ratios, at each token (N,). GSPO, arXiv:2507.18071, eq.
    7, 14.

    The value at a token has the gradient of that token ("token", straight-through, verl) or of the
    mean ("sequence"; TRL, AReaL). With one advantage per sequence and equal token weights, both
    give the same gradient of the loss. The logarithm is at most ``bound`` (unbounded in TRL,
    AReaL).
    """
    check_option("sequence_ratio gradient", gradient, ("token", "sequence"))
    log_ratio_N = sequences.spread(sequence_mean(logp_N - old_logp_N, sequences))
    if gradient == "token":
        logp_N = sequences.only(logp_N)
        log_ratio_N = logp_N - logp_N.detach() + log_ratio_N.detach()
    return (log_ratio_N if bound is None else log_ratio_N.clamp(max=bound)).exp()


def clipped_surrogate(
    ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_max: float | None = None,
) -> Tensor:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, with gradient through the ratio.

    Clipped ratios have no gradient. For A < 0 the loss is at most ``-A * dual_clip`` (> 1),
    arXiv:1912.09729. The unclipped ratio is at most ``ratio_max`` for both signs (two-sided GRPO,
    INTELLECT-2 arXiv:2505.07291; TRL's delta).
    """
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max)
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)
    if dual_clip is None:
        return loss_N
    return torch.where(advantage_N < 0, torch.minimum(-advantage_N * dual_clip, loss_N), loss_N)


def weighted_logp_loss(
    ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """CISPO's loss for a ratio of a token or a sequence."""
    return -ratio_N.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_N * logp_N


def gated_surrogate(
    ratio_N: Tensor, advantage_N: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """``-A (4 / tau) sigmoid(tau (r - 1))``, tau by the sign of A (0 is negative)."""
    positive, negative = (torch.as_tensor(tau, dtype=ratio_N.dtype) for tau in (tau_positive, tau_negative))
    tau_N = torch.where(advantage_N > 0, positive, negative)
    return -(torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N) * advantage_N


# -------------------------------------------------------------------- policy losses, one number per token


def ppo_loss(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, bound: float | None = LOG_RATIO_BOUND, **clips: Any
) -> Tensor:
    """PPO (arXiv:1707.06347; clip-higher: DAPO, arXiv:2503.14476), clips as `clipped_surrogate`."""
    return clipped_surrogate(token_ratio(logp_N, old_logp_N, bound=bound), advantage_N, **clips)


def gspo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequences: Sequences,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    gradient: str = "token",
    bound: float | None = SEQUENCE_LOG_RATIO_BOUND,
    **clips: Any,
) -> Tensor:
    """GSPO, arXiv:2507.18071, clips of sec. 5.1; aggregate with ``seq-mean-token-mean``."""
    ratio_N = sequence_ratio(logp_N, old_logp_N, sequences, gradient=gradient, bound=bound)
    return clipped_surrogate(ratio_N, advantage_N, clip_low=clip_low, clip_high=clip_high, **clips)


def cispo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    bound: float | None = LOG_RATIO_BOUND,
) -> Tensor:
    """``-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p``. CISPO, arXiv:2506.13585, eq. 4, 5.
    ``clip_low=1`` means no lower bound, as in the paper, which gives no upper bound; TRL and AReaL
    recommend 5."""
    ratio_N = token_ratio(logp_N, old_logp_N, bound=bound)
    return weighted_logp_loss(ratio_N, logp_N, advantage_N, clip_low=clip_low, clip_high=clip_high)


def sapo_loss(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, bound: float | None = LOG_RATIO_BOUND, **taus: float
) -> Tensor:
    """SAPO, arXiv:2511.20347, taus as `gated_surrogate`; aggregate with ``seq-mean-token-mean``."""
    return gated_surrogate(token_ratio(logp_N, old_logp_N, bound=bound), advantage_N, **taus)


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
    """``-mean(A) exp(mean(clipped log r))`` of a sequence, at each token. GMPO, arXiv:2507.20673.

    Aggregate with ``seq-mean-token-mean``. A log ratio is clipped to [-clip_low, clip_high] if that
    makes the objective smaller, as in PPO; the paper's range is (e^-0.4, e^0.4). ``token_eps`` is
    the ``eps`` of the means (verl: 1e-8). Log ratios are first clamped to [-bound, bound] (not in
    verl), because the clip does not bound large ratios if A < 0.
    """
    sign_N = torch.sign(advantage_N)
    log_ratio_N = logp_N - old_logp_N
    if bound is not None:
        log_ratio_N = log_ratio_N.clamp(-bound, bound)
    clipped_N = log_ratio_N.clamp(-clip_low, clip_high)
    pessimistic_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clipped_N)
    ratio_S = sequence_mean(pessimistic_N, sequences, eps=token_eps).exp()
    return sequences.spread(-sequence_mean(advantage_N, sequences, eps=token_eps) * ratio_S)


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

    ``low`` (A <= 0) and ``high`` (A > 0) bound a divergence of the outcomes "this token or
    another": total variation |p_now - p_old| ("tv"; prime-rl, verl's ``dppo_tv``), or KL(p_old |
    p_now) ("kl"; verl's ``dppo_kl``). Only changes in the direction of the advantage are bounded.
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
    """``-A r`` where `dppo_keep`, plus ``log_ratio_coef * (log r)^2`` at every token (prime-rl:
    1e-3). With ``ratio_max`` the loss is ``-A stop(min(r, ratio_max)) log p`` (verl: 20); without
    it the gradient goes through r (prime-rl)."""
    keep_N = dppo_keep(logp_N, old_logp_N, advantage_N, low=clip_low, high=clip_high, divergence=divergence)
    ratio_N = token_ratio(logp_N, old_logp_N, bound=bound)
    if ratio_max is not None:
        ratio_N = ratio_N.clamp(max=ratio_max).detach() * logp_N
    loss_N = torch.where(keep_N, -advantage_N * ratio_N, torch.zeros_like(ratio_N))
    if log_ratio_coef:
        loss_N = loss_N + log_ratio_coef * (logp_N - old_logp_N).square()
    return loss_N


def reinforce_loss(logp_N: Tensor, advantage_N: Tensor, *, weight_N: Tensor | None = None) -> Tensor:
    """``-A log p``, times ``weight_N`` without gradient (Williams 1992; verl: ``gpg``,
    ``reinforce``). Unbiased only on samples of the current policy, or with importance weights."""
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
    """``-phi(w) A log p``, ``phi(w) = e^lambda w^k e^(-lambda w)``. VESPO, arXiv:2602.10693.

    w is the sequence's ratio, times ``weight_N`` (trainer over engine). As in TRL 1.16, token log
    ratios are clamped to +-20 and the sequence's to [log 1e-8, 20], A >= 0 counts as positive, and
    phi has no gradient.
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


@torch.no_grad()
def clip_sums(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Sums (scalars): ratio, clipped tokens, k3 from the old policy; and the largest ratio."""
    log_ratio_N = (logp_N - old_logp_N).double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = log_ratio_N.exp()
    return {
        "ratio_sum": ratio_N.sum(),
        "ratio_max": ratio_N.max() if ratio_N.numel() else ratio_N.sum(),
        "clipped_low": ((advantage_N < 0) & (ratio_N < 1 - clip_low)).sum(),
        "clipped_high": ((advantage_N > 0) & (ratio_N > 1 + clip_high)).sum(),
        "kl_sum": (ratio_N - 1 - log_ratio_N).sum(),
    }


# -------------------------------------------------------------------- divergences from a reference or a teacher


def kl_estimate(
    logp_N: Tensor, reference_logp_N: Tensor, estimator: str = "k3", *, bound: float | None = None
) -> Tensor:
    """Estimate of KL(p | reference) at tokens drawn from p, in nats.

    Schulman, "Approximating KL divergence" (2020). With d = log p - log p_reference: ``k1`` d (its
    gradient has mean 0), ``abs`` |d|, ``k2`` d^2/2 (biased, with the gradient of the divergence),
    ``k3`` exp(-d) - 1 + d (unbiased, never negative). A trailing ``+`` keeps the value and takes
    the gradient of k2, unbounded (straight-through, arXiv:2506.09477). The estimate is clamped to
    [-bound, bound]; for k3, d is first clamped to twice that (verl). Beyond a bound the gradient is
    0.
    """
    check_option("kl_estimate", estimator, KL_ESTIMATORS)
    difference_N = logp_N - reference_logp_N
    kind = estimator.removesuffix("+")
    if kind == "k1":
        value_N = difference_N
    elif kind == "abs":
        value_N = difference_N.abs()
    elif kind == "k2":
        value_N = 0.5 * difference_N.square()
    else:
        log_r_N = -difference_N if bound is None else (-difference_N).clamp(-2 * bound, 2 * bound)
        value_N = log_r_N.expm1() - log_r_N
    if bound is not None:
        value_N = value_N.clamp(-bound, bound)
    if not estimator.endswith("+"):
        return value_N
    gradient_N = 0.5 * difference_N.square()
    return gradient_N - gradient_N.detach() + value_N.detach()


@dataclass(slots=True)
class KLCoefficient:
    """The coefficient of a KL penalty, adapted per batch (arXiv:1909.08593, sec. 2.2, and verl).
    ``seen`` is the sum of trajectories' mean KL per token in nats, and their number."""

    value: float
    seen: tuple[float, int] = (0.0, 0)

    def adapt(self, target: float, horizon: float) -> None:
        """Adapt ``value`` so that the mean KL approaches ``target`` nats. One batch changes the
        value by a share of at most 0.2 x trajectories / ``horizon``."""
        total, count = self.seen
        if count:
            error = min(max(total / count / target - 1, -_MOST_CHANGE), _MOST_CHANGE)
            self.value *= max(0.0, 1 + error * count / horizon)


def top_k_divergence(
    logp_NK: Tensor, rest_N: Tensor, teacher_NK: Tensor, teacher_rest_N: Tensor, direction: KLDirection
) -> Tensor:
    """Divergence (N,) in nats over K tokens and one outcome for all other tokens.

    A lower bound of the divergence over the vocabulary. AsyncOPD (arXiv:2606.24143), after GKD
    (arXiv:2306.13649); the paper's sum over K tokens alone can be negative. ``rest_N`` and
    ``teacher_rest_N`` are -inf if no other token exists.
    """
    ours_NO = torch.cat([logp_NK, rest_N[:, None]], -1)
    theirs_NO = torch.cat([teacher_NK, teacher_rest_N[:, None]], -1)
    weight_NO = theirs_NO if direction == "forward" else ours_NO
    none_NO = weight_NO == -torch.inf  # 0 log 0 is 0; its gradient, too
    gap_NO = (theirs_NO - ours_NO).masked_fill(none_NO, 0.0)
    if direction == "reverse":
        gap_NO = -gap_NO
    return (weight_NO.masked_fill(none_NO, 0.0).exp().masked_fill(none_NO, 0.0) * gap_NO).sum(-1)


def sampled_divergence(logp_NK: Tensor, teacher_NK: Tensor, old_NK: Tensor | None) -> Tensor:
    """Estimate of the divergence (N,) in nats; its gradient estimates the divergence's gradient.

    Forward: the teacher drew the K tokens. Reverse: the student drew them with log-probabilities
    ``old_NK``; as sum_a p grad log p = 0, the unclipped ratio p / p_old gives the mean gradient of
    KL(p | q), however old p_old is.
    """
    if old_NK is None:
        return (teacher_NK - logp_NK).mean(-1)
    advantage_NK = (teacher_NK - logp_NK).detach()
    return -((logp_NK - old_NK).exp() * advantage_NK).mean(-1)
