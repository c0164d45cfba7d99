"""The divergence between teacher q and student p at each place, from part of the vocabulary, as a loss of the student.

Source: AsyncOPD (arXiv:2606.24143), after GKD (arXiv:2306.13649).

``top_k``: the K tokens that the teacher finds likeliest, and all others together as one more outcome. The divergence of these
K + 1 outcomes is at most that of the vocabulary, and equal to it where K is all of it.

``sampled``, forward, a_i drawn by the teacher: ``1/m sum_i (log q(a_i) - log p(a_i))``.

``sampled``, reverse, a_i drawn by the student as it was, p_old: ``-1/m sum_i rho(a_i) sg[A(a_i)]``, with ``A = log q - log p`` of
the student as it is now (fresh; "sg": no gradient) and ``rho = p / p_old``, unclipped. Its gradient is in the mean that of
KL(p || q), however old p_old is, because sum_a p grad log p = 0: no bias in value and gradient, and 1 / m of the variance of one.

Differs from the paper: its top-k sums over the K tokens alone, which is no divergence: it can be negative, and in reverse it is
smallest where the student leaves the K tokens. Here what is left is an outcome of its own.

Shape legend: N tokens, K columns (tokens of the vocabulary) of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.config.distil import KLDirection


def top_k_divergence(
    logp_NK: Tensor, rest_N: Tensor, teacher_NK: Tensor, teacher_rest_N: Tensor, direction: KLDirection
) -> Tensor:
    """Divergence of K + 1 outcomes (N,) in nats, with gradient to ``logp_NK`` and ``rest_N``.

    ``rest_N`` and ``teacher_rest_N`` are log-probabilities of all other tokens together, -inf where there is none.
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
    """Estimate of the divergence (N,) in nats, with a gradient to ``logp_NK`` that is one of its gradient.

    Parameters
    ----------
    old_NK : tensor or None
        Log-probabilities with which the student drew the tokens: reverse. None: the teacher drew them, forward.
    """
    if old_NK is None:
        return (teacher_NK - logp_NK).mean(-1)
    advantage_NK = (teacher_NK - logp_NK).detach()
    return -((logp_NK - old_NK).exp() * advantage_NK).mean(-1)
