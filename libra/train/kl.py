"""Estimators of the divergence from one policy to another, token by token.

Shape legend: N action tokens, in any arrangement; every function is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from libra.config.algorithms import KLEstimator
from libra.train.choice_check import check_option

_MOST_CHANGE = 0.2
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def kl_estimate(
    logp_N: Tensor,
    reference_logp_N: Tensor,
    estimator: str = "k3",
    *,
    bound: float | None = None,
    log_ratio_bound: float | None = None,
) -> Tensor:
    """Estimate of KL(p | reference) at tokens drawn from p, in nats.

    Schulman, "Approximating KL divergence" (2020). With d = log p - log p_reference: ``k1`` d (unbiased, but its gradient
    has mean 0: useless in a loss), ``abs`` |d|, ``k2`` d^2/2 (biased, with the gradient of the divergence), ``k3``
    exp(-d) - 1 + d (unbiased, never negative). A trailing ``+`` keeps the value and takes the gradient of k2, unbounded
    (straight-through, arXiv:2506.09477).

    Parameters
    ----------
    logp_N, reference_logp_N : Tensor
    estimator : str
        One of `KL_ESTIMATORS`.
    bound : float, optional
        The estimate is clamped to [-bound, bound]: 10 for k3 in verl, slime's low_var_kl, and all of OpenRLHF's.
    log_ratio_bound : float, optional
        For k3, d is clamped to [-log_ratio_bound, log_ratio_bound] before: 20 in verl. Beyond a bound the gradient is 0.
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
        if log_ratio_bound is not None:
            log_r_N = log_r_N.clamp(-log_ratio_bound, log_ratio_bound)
        value_N = log_r_N.expm1() - log_r_N
    if bound is not None:
        value_N = value_N.clamp(-bound, bound)
    if not estimator.endswith("+"):
        return value_N
    gradient_N = 0.5 * difference_N.square()
    return gradient_N - gradient_N.detach() + value_N.detach()


def k3(logp_N: Tensor, reference_logp_N: Tensor, *, bound: float | None = 10.0) -> Tensor:
    """``kl_estimate(..., "k3")``, bounded as verl's low_var_kl unless ``bound`` is None."""
    return kl_estimate(
        logp_N, reference_logp_N, "k3", bound=bound, log_ratio_bound=None if bound is None else 2 * bound
    )


@dataclass(slots=True)
class KLCoefficient:
    """The coefficient of a KL penalty, adapted after each batch (Ziegler et al., arXiv:1909.08593, sec. 2.2; as verl's controller).

    Attributes
    ----------
    value : float
    seen : (float, int)
        Sum over trajectories of their mean KL per token in nats, and how many, of the batch in progress.
    """

    value: float
    seen: tuple[float, int] = (0.0, 0)

    def adapt(self, target: float, horizon: float) -> None:
        """Change the value by a share of at most 0.2 x trajectories / ``horizon``, towards a mean KL of ``target`` nats."""
        total, count = self.seen
        if count:
            error = min(max(total / count / target - 1, -_MOST_CHANGE), _MOST_CHANGE)
            self.value *= max(0.0, 1 + error * count / horizon)
