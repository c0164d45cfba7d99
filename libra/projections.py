"""Random projections of linear layers: outputs for inputs that a seed and the layer's name determine.

Trainer and engine compute the same few numbers of each layer from their own weights, and exchange
no tensor. The convention, for the layer whose weight is ``name`` in a Hugging Face state dict:

* the generator is ``numpy.random.default_rng((seed, crc32(name)))``;
* a linear layer with d inputs: x is ``standard_normal(d, float32) / sqrt(d)``, cast to the type
  served, and y = W x (no bias) in that type. An embedding: 64 token ids ``integers(0, rows, 64)``,
  and y is the mean of their rows in float64;
* the numbers are y . s / sqrt(len(y)) in float64, for the 8 rows s of ``integers(0, 2, (8,
  len(y)), int8) * 2 - 1``, drawn next from the same generator.

A change of W by D moves each number by a nearly normal variable of standard deviation RMS(D).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

NUM_PROJECTIONS = 8  # numbers per layer
NUM_ROWS = 64  # token ids whose embeddings are averaged
EMBEDDING_ENDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Endings of the names of input embeddings."""


def is_embedding(name: str) -> bool:
    """Whether a weight is an input embedding, not the matrix of a linear layer."""
    return name.endswith(EMBEDDING_ENDINGS)


def generator_of(seed: int, name: str) -> np.random.Generator:
    """The source of a layer's random numbers."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def draw_input(generator: np.random.Generator, inputs: int) -> NDArray[np.float32]:
    """The input of a linear layer (inputs,)."""
    return generator.standard_normal(inputs, dtype=np.float32) / np.float32(math.sqrt(inputs))


def draw_rows(generator: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """The token ids for an embedding (64,)."""
    return generator.integers(0, rows, NUM_ROWS)


def numbers_of(generator: np.random.Generator, output: Tensor) -> tuple[float, ...]:
    """The 8 numbers of an output (n,), or of embedding rows (64, n), drawn after the input."""
    y = output.detach().to(torch.float64).cpu().numpy()
    if y.ndim == 2:
        y = y.mean(0)
    signs = generator.integers(0, 2, (NUM_PROJECTIONS, len(y)), dtype=np.int8) * 2 - 1
    return tuple(float(number) for number in signs @ y / math.sqrt(len(y)))


@torch.no_grad()
def project_layer(
    name: str, seed: int, *, inputs: int, dtype: torch.dtype, apply: Callable[[Tensor], Tensor]
) -> tuple[float, ...]:
    """The numbers of one layer as ``apply`` computes it. ``apply`` maps (1, ``inputs``) in
    ``dtype`` to (1, outputs); for an embedding of ``inputs`` rows, int64 ids (64,) to their
    rows."""
    generator = generator_of(seed, name)
    if is_embedding(name):
        return numbers_of(generator, apply(torch.from_numpy(draw_rows(generator, inputs))))
    x = torch.from_numpy(draw_input(generator, inputs)).to(dtype)
    return numbers_of(generator, apply(x[None])[0])


def _apply(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
    return operation(x.to(weight.device), weight)


def project_tensors(tensors: Mapping[str, Tensor], seed: int) -> dict[str, tuple[float, ...]]:
    """The numbers of every matrix of a state dict that has tied weights under all their names."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.endswith(".weight"):
            embeds = is_embedding(name)
            apply = partial(_apply, F.embedding if embeds else F.linear, tensor)
            inputs = tensor.shape[0 if embeds else 1]
            found[name] = project_layer(name, seed, inputs=inputs, dtype=tensor.dtype, apply=apply)
    return found
