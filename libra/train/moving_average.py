"""The moving average of a replica's weights, for ``trainer.old_logp=ewma``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from libra.train.model_layout import laid_out, local

logger = logging.getLogger(__name__)

EWMA = "ewma"
"""Suffix of the average's tensors in a checkpoint."""


class MovingAverage:
    """Exponentially weighted average of the weights after each batch, in float32 or wider. PPO-EWMA, arXiv:2110.00641.

    It begins as the weights there are. Differs from the paper: it moves once per batch, not once per optimizer step.

    Parameters
    ----------
    tensors : mapping
        The weights by name, in their local layout.
    decay : float
        Share of the average that stays.
    """

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.tensors = self._begin(tensors)

    @staticmethod
    def _begin(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }

    @torch.no_grad()
    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """``decay`` x average + (1 - ``decay``) x ``tensors``."""
        for name, average in self.tensors.items():
            local(average).lerp_(local(tensors[name]).to(local(average)), 1 - self.decay)

    def load(self, stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Take the whole tensors of a checkpoint; if it has none, begin again at its weights, ``tensors``."""
        if any(f"{name}.{EWMA}" not in stored for name in self.tensors):
            logger.info("the checkpoint has no moving average of the weights; it begins at its weights")
            self.tensors = self._begin(tensors)
            return
        self.tensors = {
            name: laid_out(stored[f"{name}.{EWMA}"].to(local(average)), average)
            for name, average in self.tensors.items()
        }
