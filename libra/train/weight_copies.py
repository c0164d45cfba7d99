"""Weights that the optimizer updates in place of the model's weights, and a moving average.

`MasterWeights` are wider copies: bfloat16 rounds away the small updates of AdamW at a learning rate
of 1e-6. `LowRankWeights` are adapters (LoRA, arXiv:2106.09685): W = W0 + (alpha / rank) B A. The
model always has W, so every engine serves it; only A and B have optimizer state and are reduced. A
checkpoint has the merged model, and in ``adapter/`` the adapters in peft's format.

1. After every `round_into_model` the model's parameter is its master copy, or W0 + (alpha / rank) B
   A, rounded to nearest once; other parameters of a model with adapters never change.
2. Only the optimizer, `load` and `take_from_model` change masters and adapters.
3. A parameter's gradient moves to its copy, or to A and B, during the backward pass: it is neither
   kept nor summed in the narrow format.
4. The same seed gives the same A on every replica; B is 0 at first, so version 0 is the model
   itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter

from libra.errors import TrainError
from libra.train.replica_group import laid_out, local, part_of


class MasterWeights:
    """Copies of ``parameters`` in ``dtype``; ``grad`` of ``tensors`` sums over backward passes."""

    def __init__(self, parameters: Mapping[str, Parameter], dtype: torch.dtype) -> None:
        self._parameters = dict(parameters)
        self.tensors = {name: Parameter(own.detach().to(dtype, copy=True)) for name, own in parameters.items()}
        for name, own in self._parameters.items():
            own.register_post_accumulate_grad_hook(_moves_gradient_to_master(self.tensors[name]))

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Copy the optimizer's weights into the model."""
        for name, own in self._parameters.items():
            own.copy_(self.tensors[name])

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Copy the model's changed weights."""
        for name, own in self._parameters.items():
            self.tensors[name].copy_(own)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take saved copies; a parameter without a saved copy keeps the model's weight."""
        self.take_from_model()
        for name, tensor in saved.items():
            self.tensors[name].copy_(tensor)


def _moves_gradient_to_master(copy: Parameter) -> Callable[[Tensor], None]:
    def move(own: Tensor) -> None:
        assert own.grad is not None
        if copy.grad is None:
            copy.grad = own.grad.to(copy.dtype)
        else:
            copy.grad += own.grad
        own.grad = None

    return move


LORA_A, LORA_B = "lora_A", "lora_B"


class LowRankWeights:
    """Adapters of a model whose other parameters are frozen here; an alternative to
    `MasterWeights`.

    ``targets`` are last parts of the names of linear layers, e.g. "q_proj"; empty: every linear
    layer but the output head. ``tensors`` are ``NAME.lora_A`` (rank, in) and ``NAME.lora_B`` (out,
    rank).
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
            bound = 1 / math.sqrt(weight.shape[1])  # as `peft`: kaiming_uniform_(a=sqrt(5))
            first = (torch.rand(rank, weight.shape[1], generator=generator) * 2 - 1) * bound
            a = Parameter(first.to(place, dtype))
            b = Parameter(torch.zeros(weight.shape[0], rank, device=place, dtype=dtype))
            self.tensors[f"{name}.weight.{LORA_A}"], self.tensors[f"{name}.weight.{LORA_B}"] = a, b
            self._adapted.append((weight, local(weight.detach()).clone(), a, b))
            weight.register_post_accumulate_grad_hook(_moves_gradient_to_adapters(a, b, self.scale))

    @torch.no_grad()
    def round_into_model(self) -> None:
        """Merge the adapters into the model."""
        for weight, base, a, b in self._adapted:
            local(weight).copy_(base.to(a.dtype) + self.scale * (part_of(b, weight) @ a))

    def take_from_model(self) -> None:
        """Do nothing: the caller then loads the adapters of the new weights."""

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take saved adapters of the same base; TrainError if an adapter is missing."""
        if missing := sorted(self.tensors.keys() - saved.keys()):
            raise TrainError(
                f"trainer.lora_rank: the checkpoint has no adapters {missing[:2]}; it is of a run without them"
            )
        for name, tensor in saved.items():
            self.tensors[name].copy_(tensor)
        self.round_into_model()


def adapted_layers(model: Any, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers that get adapters, by name; TrainError if a target matches none."""
    head = model.get_output_embeddings()
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    known = {name.rpartition(".")[2] for name in linear}
    unknown = [target for target in targets if target not in known]
    if unknown or not linear:
        raise TrainError(
            f"trainer.lora_args.targets: got {', '.join(unknown) or 'none'}; linear layers of this {type(model).__name__} "
            f"are called {', '.join(sorted(known)) or 'nothing: it has none'}"
        )
    return {name: layer for name, layer in linear.items() if not targets or name.rpartition(".")[2] in targets}


def _moves_gradient_to_adapters(a: Parameter, b: Parameter, scale: float) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def move(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = local(weight.grad).to(a.dtype)  # of this replica's rows
        for adapter in (a, b):
            if adapter.grad is None:
                adapter.grad = torch.zeros_like(adapter)
        assert a.grad is not None and b.grad is not None
        a.grad.add_(part_of(b, weight).T @ gradient, alpha=scale)
        part_of(b.grad, weight).add_(gradient @ a.T, alpha=scale)
        weight.grad = None

    return move


ADAPTER_DIR = "adapter"


def adapter_config(adapters: LowRankWeights, base: str) -> str:
    """The content of ``adapter_config.json``; the adapters belong to the model ``base``."""
    layers = sorted({name.removesuffix(f".weight.{LORA_A}") for name in adapters.tensors if name.endswith(LORA_A)})
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": adapters.rank,
        "lora_alpha": adapters.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": layers,
    }  # fmt: skip
    return json.dumps(values, indent=2) + "\n"


def write_adapter(directory: Path, config: str, tensors: Mapping[str, Tensor]) -> None:
    """Create ``directory`` with ``config`` and the adapters, named as `LowRankWeights.tensors`."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(config, encoding="utf-8")
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        assert kind in (LORA_A, LORA_B), name
        renamed[f"base_model.model.{layer.removesuffix('.weight')}.{kind}.weight"] = tensor.contiguous()
    save_file(renamed, directory / "adapter_model.safetensors", metadata={"format": "pt"})


logger = logging.getLogger(__name__)
EWMA = "ewma"
"""Suffix of the average's tensors in a checkpoint."""


class MovingAverage:
    """Exponentially weighted average of the weights, in at least float32. PPO-EWMA,
    arXiv:2110.00641.

    The average starts as the given weights (in their local layout); ``decay`` is the share that is
    kept. Differs from the paper: the average moves once per batch, not once per optimizer step.
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
        """Set the average to ``decay`` x average + (1 - ``decay``) x ``tensors``."""
        for name, average in self.tensors.items():
            local(average).lerp_(local(tensors[name]).to(local(average)), 1 - self.decay)

    def load(self, stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Take the average of a checkpoint; without one, restart from its weights ``tensors``."""
        if any(f"{name}.{EWMA}" not in stored for name in self.tensors):
            logger.info("the checkpoint has no moving average of the weights; it begins at its weights")
            self.tensors = self._begin(tensors)
            return
        self.tensors = {
            name: laid_out(stored[f"{name}.{EWMA}"].to(local(average)), average)
            for name, average in self.tensors.items()
        }
