"""Random projections and columns of an engine's layers as they are used.

The engine's side of the version check (`libra.weights.version_check`). Each answer goes through the matrices that a step
multiplies with, in the joined or transposed form of a fused pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import EngineError
from libra.projections import is_embedding, project_layer
from libra.rollout.decode_forward import Forward

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class UsedLayer:
    """One layer: its number of inputs (rows of an embedding), and what it does to (N, inputs), without bias."""

    inputs: int
    apply: Apply


def used_layers(forward: Forward) -> dict[str, UsedLayer]:
    """Every linear layer and embedding by the name of its weight, in the form of the fused pass if it has one."""
    found: dict[str, UsedLayer] = {}
    model, fused, stock_head = forward.model, forward.fused, forward.model.get_output_embeddings()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.ndim == 2 and name.endswith(".weight"):
            table = is_embedding(name)
            found[name] = UsedLayer(weight.shape[0 if table else 1], _lookup(weight) if table else _linear(weight))
    head = next(name for name, module in model.named_modules() if module is stock_head)
    found[f"{head}.weight"] = UsedLayer(stock_head.in_features, _linear(forward.head.weight))
    if fused is not None:
        prefix = next(name for name, module in model.named_modules() if module is model.base_model.layers)
        for index, layer in enumerate(fused.layers):
            for name, matrix in _joined(layer, model.base_model.layers[index]).items():
                found[f"{prefix}.{index}.{name}.weight"] = UsedLayer(matrix.shape[1], _linear(matrix))
            for name, transposed in (("self_attn.o_proj", layer.out_t), ("mlp.down_proj", layer.down_t)):
                found[f"{prefix}.{index}.{name}.weight"] = UsedLayer(transposed.shape[0], _product(transposed))
    return found


def used_vectors(forward: Forward) -> dict[str, Tensor]:
    """Every norm and bias by name; head norms that a fused pass has folded into its scale, in that form."""
    model, fused = forward.model, forward.fused
    found = {name: tensor for name, tensor in model.named_parameters() if tensor.ndim == 1}
    if fused is not None:
        prefix = next(name for name, module in model.named_modules() if module is model.base_model.layers)
        for index, layer in enumerate(fused.layers):
            attention = f"{prefix}.{index}.self_attn"
            if layer.q_norm is not None and layer.k_norm is not None:
                query = layer.q_norm.weight * layer.head_dim**-0.5
                if not bool((layer.scale_RD[: layer.heads] == query).all()):
                    found[f"{attention}.q_norm.weight"] = layer.scale_RD[0] * layer.head_dim**0.5
                found[f"{attention}.k_norm.weight"] = layer.scale_RD[-1]
            begin = 0
            if layer.qkv_bias is not None:
                for name in ("q_proj", "k_proj", "v_proj"):
                    size = len(found[f"{attention}.{name}.bias"])
                    found[f"{attention}.{name}.bias"] = layer.qkv_bias[begin : begin + size]
                    begin += size
    return found


def project(layers: Mapping[str, UsedLayer], seed: int, dtype: torch.dtype) -> dict[str, tuple[float, ...]]:
    """The numbers of `libra.projections` for every layer."""
    return {
        name: project_layer(name, seed, inputs=layer.inputs, dtype=dtype, apply=layer.apply)
        for name, layer in layers.items()
    }


@torch.inference_mode()
def columns(
    layers: Mapping[str, UsedLayer],
    vectors: Mapping[str, Tensor],
    wanted: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, NDArray[np.float32]]:
    """The requested columns of each matrix (K, outputs); rows of an embedding; a vector whole, as (1, n).

    A column is the layer's output for an input that is 1 in one place and 0 elsewhere, which rounding cannot change.
    """
    found: dict[str, NDArray[np.float32]] = {}
    for name, places in wanted.items():
        if name in vectors:
            found[name] = vectors[name].detach()[None].float().cpu().numpy()
        elif name in layers and is_embedding(name):
            found[name] = layers[name].apply(torch.tensor(places)).float().cpu().numpy()
        elif name in layers:
            one_hot = F.one_hot(torch.tensor(places), layers[name].inputs).to(dtype)
            found[name] = layers[name].apply(one_hot).float().cpu().numpy()
        else:
            raise EngineError(f"columns: this model has no {name}; it has {', '.join(list(layers)[:4])}, ...")
    return found


def _joined(layer: Any, stock: Any) -> dict[str, Tensor]:
    """Row blocks of the joined matrices, by the layer whose weights they are."""
    blocks, begin = {}, 0
    for name in ("q_proj", "k_proj", "v_proj"):
        end = begin + int(getattr(stock.self_attn, name).out_features)
        blocks[f"self_attn.{name}"] = layer.qkv[begin:end]
        begin = end
    size = int(stock.mlp.gate_proj.out_features)
    return blocks | {"mlp.gate_proj": layer.gate_up[:size], "mlp.up_proj": layer.gate_up[size:]}


def _linear(weight: Tensor) -> Apply:
    return lambda x: F.linear(x.to(weight.device), weight)


def _product(transposed: Tensor) -> Apply:
    return lambda x: x.to(transposed.device) @ transposed


def _lookup(table: Tensor) -> Apply:
    return lambda ids: F.embedding(ids.to(table.device), table)
