"""Seconds of a training step's forward and backward passes on one GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.hardware.engine import ModelOnGPU
from libra.hardware.forms import Efficiencies, attention_prefill_s
from libra.hardware.gpus import GPU
from libra.hardware.operators import layer_s, operator_s
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]


def forward_s(
    gpu: GPU,
    eff: Efficiencies,
    shape: ModelShape,
    sequence_tokens: Array,
    micro_batch_tokens: int,
    engine: ModelOnGPU | None = None,
) -> tuple[float, Array]:
    """Seconds per token of everything but attention, at micro-batches of ``micro_batch_tokens``, and of attention per sequence.

    Attention is the causal one of a whole sequence, whose seconds grow with its square.
    """
    num = float(micro_batch_tokens)
    if engine is None:
        layer = layer_s(gpu, eff, shape, 1, num)
        attention = attention_prefill_s(gpu, eff, sequence_tokens, 0.0, shape.num_heads, shape.head_dim)
    else:
        layer = engine.layer_s(num)
        attention = engine.attention_prefill_s(sequence_tokens, 0.0)
    head = operator_s(gpu, eff, shape, 1, "lm_head", num)
    return float(shape.num_layers * layer + head) / num, shape.num_layers * attention


def backward_over_forward(shape: ModelShape) -> float:
    """Backward over forward seconds: each product has two, one for its input and one for its weight."""
    return 2.0
