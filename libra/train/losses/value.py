"""The loss of a critic: squared error, clipped around the old prediction.

Shape legend: N tokens, in any arrangement.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float | None = 0.5, scale: float = 0.5
) -> Tensor:
    """``scale * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)``. PPO2; agrees with verl 0.9.1 and OpenRLHF.

    ``clip=None``: not clipped. Library only: no run trains a critic.
    """
    loss_N = (value_N - return_N).square()
    if clip is not None:
        clipped_N = torch.maximum(torch.minimum(value_N, old_value_N + clip), old_value_N - clip)
        loss_N = torch.maximum(loss_N, (clipped_N - return_N).square())
    return scale * loss_N


@torch.no_grad()
def value_clipped(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float) -> Tensor:
    """Where the clipped error is the larger one (N,) bool; its mean is verl's ``vf_clipfrac``."""
    clipped_N = torch.maximum(torch.minimum(value_N, old_value_N + clip), old_value_N - clip)
    return (clipped_N - return_N).square() > (value_N - return_N).square()
