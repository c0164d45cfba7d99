"""Whitening: mean 0 and variance 1 over the values that count.

Shape legend: N values in any arrangement.
"""

from __future__ import annotations

import torch
from torch import Tensor


def whiten(
    value_N: Tensor, weight_N: Tensor, *, eps: float = 1e-8, count_eps: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    """``(value - mean) / sqrt(variance + eps)``, with Bessel's correction. Agrees with verl 0.9.1's masked_whiten.

    ``weight_N`` is how often a value counts: a mask, or e.g. the tokens of a sequence that share it. ``eps`` and ``count_eps`` are
    added to the variance and to the count in the means; ``shift_mean=False`` keeps the mean. Values of weight 0 are shifted and
    scaled like the others. If the weights sum to 1 or less, or all values that count are equal, the values are centred and
    not scaled (verl raises; dividing by sqrt(1e-8) would turn rounding into signal).
    """
    weight_N = weight_N.to(value_N.dtype)
    counted_N = torch.where(weight_N > 0, value_N, torch.zeros_like(value_N))
    total = weight_N.sum()
    mean = (counted_N * weight_N).sum() / (total + count_eps)
    seen_N = value_N[weight_N > 0]
    if float(total) <= 1 or float(seen_N.amin()) == float(seen_N.amax()):
        exact = seen_N[0] if seen_N.numel() else mean  # no rounding where all are equal
        return value_N - exact if shift_mean else value_N.clone()
    variance = ((counted_N - mean).square() * weight_N).sum() / (total + count_eps) * total / (total - 1)
    whitened_N = (value_N - mean) * torch.rsqrt(variance + eps)
    return whitened_N if shift_mean else whitened_N + mean
