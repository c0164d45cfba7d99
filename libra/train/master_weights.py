"""Weights in a wider format than the model computes in, for an optimizer whose updates the narrow format would lose.

bfloat16 has 8 bits of mantissa: an update below 1/512 of a weight rounds to nothing, and AdamW at a learning rate of 1e-6 makes
only such. So the optimizer updates float32 copies, gradients are summed in float32, and the model gets the rounded copies.

Invariants
----------
1. After every `round_into_model` the model's parameter is its copy, rounded to nearest.
2. Copies change by the optimizer, `load` and `take_from_model` only.
3. A parameter's own gradient is moved into its copy's as soon as a backward pass has made it, so it is never summed in the
   narrow format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter


class MasterWeights:
    """Copies of ``parameters`` in ``dtype``, which the optimizer updates in their place.

    Attributes
    ----------
    tensors : dict of Parameter
        By the parameter's name; their ``grad`` is the sum over backward passes.
    """

    def __init__(self, parameters: Mapping[str, Parameter], dtype: torch.dtype) -> None:
        self._parameters = dict(parameters)
        self.tensors = {name: Parameter(own.detach().to(dtype, copy=True)) for name, own in parameters.items()}
        for name, own in self._parameters.items():
            own.register_post_accumulate_grad_hook(_moves_gradient_to(self.tensors[name]))

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Copy the optimizer's weights into the model."""
        for name, own in self._parameters.items():
            own.copy_(self.tensors[name])

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Copy the model's own weights again, which have changed."""
        for name, own in self._parameters.items():
            self.tensors[name].copy_(own)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take saved copies; a parameter without one keeps the model's own weight."""
        self.take_from_model()
        for name, tensor in saved.items():
            self.tensors[name].copy_(tensor)


def _moves_gradient_to(copy: Parameter) -> Callable[[Tensor], None]:
    def move(own: Tensor) -> None:
        assert own.grad is not None
        if copy.grad is None:
            copy.grad = own.grad.to(copy.dtype)
        else:
            copy.grad += own.grad
        own.grad = None

    return move
