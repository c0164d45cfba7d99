"""Divergences of each token: from a reference policy by estimators, and from a teacher as a loss.

Teacher q and student p at each place, from part of the vocabulary: AsyncOPD (arXiv:2606.24143),
after GKD (arXiv:2306.13649).

``top_k``: the teacher's K likeliest tokens, and all others together as one more outcome. The
divergence of these K + 1 outcomes is at most that over the vocabulary. The paper sums over the K
tokens alone, which can be negative and, in reverse, is smallest where the student leaves the K
tokens.

``sampled``, forward, a_i drawn by the teacher: ``1/m sum_i (log q(a_i) - log p(a_i))``.

``sampled``, reverse, a_i drawn by the student as it was, p_old: ``-1/m sum_i rho(a_i) sg[A(a_i)]``,
with ``A = log q - log p`` of the present student ("sg": no gradient) and ``rho = p / p_old``,
unclipped. Its mean gradient is the gradient of KL(p || q), however old p_old is, because sum_a p
grad log p = 0.

Shape legend: N action tokens, K columns (tokens of the vocabulary) of each, O = K + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from libra.config.algorithms import KLEstimator
from libra.config.task_sections import KLDirection
from libra.train.sequences import check_option

_MOST_CHANGE = 0.2
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)

KL_BOUND = 10.0
"""Bound of a token's KL estimate in a step, in nats (verl, slime and OpenRLHF for k3)."""


def kl_estimate(
    logp_N: Tensor, reference_logp_N: Tensor, estimator: str = "k3", *, bound: float | None = None
) -> Tensor:
    """Estimate of KL(p | reference) at tokens drawn from p, in nats.

    Schulman, "Approximating KL divergence" (2020). With d = log p - log p_reference: ``k1`` d (its
    gradient has mean 0), ``abs`` |d|, ``k2`` d^2/2 (biased, with the gradient of the divergence),
    ``k3`` exp(-d) - 1 + d (unbiased, never negative). A trailing ``+`` keeps the value and takes the
    gradient of k2, unbounded (straight-through, arXiv:2506.09477). The estimate is clamped to [-bound,
    bound]: 10 for k3 in verl, slime's low_var_kl, and all of OpenRLHF's. For k3, d is first clamped to
    twice that, as in verl. Beyond a bound the gradient is 0.
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
        log_r_N = -difference_N
        if bound is not None:
            log_r_N = log_r_N.clamp(-2 * bound, 2 * bound)
        value_N = log_r_N.expm1() - log_r_N
    if bound is not None:
        value_N = value_N.clamp(-bound, bound)
    if not estimator.endswith("+"):
        return value_N
    gradient_N = 0.5 * difference_N.square()
    return gradient_N - gradient_N.detach() + value_N.detach()


@dataclass(slots=True)
class KLCoefficient:
    """The coefficient of a KL penalty, adapted after each batch (arXiv:1909.08593, sec. 2.2; verl's
    controller).

    ``seen``: sum over trajectories of their mean KL per token in nats, and their number, in this batch.
    """

    value: float
    seen: tuple[float, int] = (0.0, 0)

    def adapt(self, target: float, horizon: float) -> None:
        """Move the value by a share of at most 0.2 x trajectories / ``horizon``, towards a mean KL of
        ``target`` nats."""
        total, count = self.seen
        if count:
            error = min(max(total / count / target - 1, -_MOST_CHANGE), _MOST_CHANGE)
            self.value *= max(0.0, 1 + error * count / horizon)


def top_k_divergence(
    logp_NK: Tensor, rest_N: Tensor, teacher_NK: Tensor, teacher_rest_N: Tensor, direction: KLDirection
) -> Tensor:
    """Divergence of K + 1 outcomes (N,) in nats, with gradient to ``logp_NK`` and ``rest_N``.

    ``rest_N`` and ``teacher_rest_N`` are log-probabilities of all other tokens together, -inf if none
    exist.
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
    """Estimate of the divergence (N,) in nats; its gradient estimates the divergence's.

    ``old_NK`` are the log-probabilities with which the student drew the tokens (reverse); without them
    the teacher drew them (forward).
    """
    if old_NK is None:
        return (teacher_NK - logp_NK).mean(-1)
    advantage_NK = (teacher_NK - logp_NK).detach()
    return -((logp_NK - old_NK).exp() * advantage_NK).mean(-1)
