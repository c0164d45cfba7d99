"""Adapters of low rank that the optimizer updates in place of the weights: LoRA, arXiv:2106.09685.

A linear layer has the weight W = W0 + (alpha / rank) B A, with A (rank, in) and B (out, rank). The model always holds W itself, so
its passes, log-probabilities, versions and their check are those of a model without adapters, and every engine serves it as any
other. Only A and B have optimizer state, are reduced over replicas, and change.

Under fsdp2 the weights are in shards of rows, and every replica has the whole adapters, which are small: a shard's gradient gives
its part of the sums for A and B, and the replicas add those up as they do without shards.

Differs from `peft`, which keeps the three apart in the forward pass: the gradient of W is computed and dropped layer by layer, in
place of those of A and B alone. The adapters are saved in its format (`libra.train.adapter_files`).

Invariants
----------
1. After every `round_into_model` the weight of an adapted layer is W0 + (alpha / rank) B A, rounded to nearest once; no other
   parameter of the model ever changes.
2. The gradient of W is turned into those of A and B as soon as a backward pass has made it, and is not kept.
3. The same seed gives the same A on every replica; B begins at 0, so version 0 is the model itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from libra.errors import TrainError
from libra.train.model_layout import local, part_of

LORA_A, LORA_B = "lora_A", "lora_B"


class LowRankWeights:
    """Adapters of a model, whose other parameters are frozen here; used as `libra.train.master_weights.MasterWeights` is.

    Parameters
    ----------
    model : transformers model
    rank : int
    alpha : float
        Scale: ``alpha / rank`` multiplies B A.
    targets : sequence of str
        Last parts of the names of linear layers, e.g. "q_proj"; empty: every linear layer but the output head.
    dtype : torch.dtype
        Of A and B.
    seed : int

    Attributes
    ----------
    tensors : dict of Parameter
        ``NAME.lora_A`` (rank, in) and ``NAME.lora_B`` (out, rank) by the name of the layer's weight; ``grad`` as the sum over
        backward passes.
    """

    def __init__(
        self, model: Any, *, rank: int, alpha: float, targets: Sequence[str], dtype: torch.dtype, seed: int
    ) -> None:
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        layers = adapted_layers(model, targets)
        model.requires_grad_(False)
        self.tensors: dict[str, Parameter] = {}
        self._adapted: list[tuple[Parameter, Tensor, Parameter, Parameter]] = []
        for name, layer in layers.items():
            weight = layer.weight
            assert isinstance(weight, Parameter)
            weight.requires_grad_()
            place = local(weight).device
            own_seed = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(own_seed))
            bound = 1 / math.sqrt(weight.shape[1])  # that of `peft`: kaiming_uniform_(a=sqrt(5))
            first = (torch.rand(rank, weight.shape[1], generator=generator) * 2 - 1) * bound
            a = Parameter(first.to(place, dtype))
            b = Parameter(torch.zeros(weight.shape[0], rank, device=place, dtype=dtype))
            self.tensors[f"{name}.weight.{LORA_A}"], self.tensors[f"{name}.weight.{LORA_B}"] = a, b
            self._adapted.append((weight, local(weight.detach()).clone(), a, b))
            weight.register_post_accumulate_grad_hook(_moves_gradient_to(a, b, self.scale))

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Merge the adapters into the model."""
        for weight, base, a, b in self._adapted:
            local(weight).copy_(base.to(a.dtype) + self.scale * (part_of(b, weight) @ a))

    def take_from_model(self) -> None:
        """Nothing: weights that were put into the model belong to adapters that `load` gets next."""

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take saved adapters of the same base; TrainError if one is missing."""
        if missing := sorted(self.tensors.keys() - saved.keys()):
            raise TrainError(
                f"trainer.lora_rank: the checkpoint has no adapters {missing[:2]}; it is of a run without them"
            )
        for name, tensor in saved.items():
            self.tensors[name].copy_(tensor)
        self.round_into_model()


def adapted_layers(model: Any, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers that get adapters, by name; TrainError if a target is none of them."""
    head = model.get_output_embeddings()
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    known = {name.rpartition(".")[2] for name in linear}
    unknown = [target for target in targets if target not in known]
    if unknown or not linear:
        raise TrainError(
            f"trainer.lora_targets: got {', '.join(unknown) or 'none'}; linear layers of this {type(model).__name__} are called "
            f"{', '.join(sorted(known)) or 'nothing: it has none'}"
        )
    return {name: layer for name, layer in linear.items() if not targets or name.rpartition(".")[2] in targets}


def _moves_gradient_to(a: Parameter, b: Parameter, scale: float) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def move(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = local(weight.grad).to(a.dtype)  # of the rows that are here
        for adapter in (a, b):
            if adapter.grad is None:
                adapter.grad = torch.zeros_like(adapter)
        assert a.grad is not None and b.grad is not None
        a.grad.add_(part_of(b, weight).T @ gradient, alpha=scale)
        part_of(b.grad, weight).add_(gradient @ a.T, alpha=scale)
        weight.grad = None

    return move
