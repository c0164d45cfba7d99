"""Estimators of the divergence from one policy to another, token by token.

Shape legend: N action tokens, in any arrangement; every function is elementwise.
"""

from __future__ import annotations

from torch import Tensor


def k3(logp_N: Tensor, reference_logp_N: Tensor, *, bound: float | None = 10.0) -> Tensor:
    """Unbiased, never negative estimate ``r - 1 - log r`` with ``r = p_reference / p``, for tokens drawn from ``p``.

    Schulman, "Approximating KL divergence" (2020). ``bound`` limits the estimate (and log r to twice it), as verl's
    low_var_kl does; beyond it the gradient is 0. None: unbounded.
    """
    log_r_N = reference_logp_N - logp_N
    if bound is None:
        return log_r_N.expm1() - log_r_N
    log_r_N = log_r_N.clamp(-2 * bound, 2 * bound)
    return (log_r_N.expm1() - log_r_N).clamp(-bound, bound)
