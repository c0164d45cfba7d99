"""Seconds and bytes of one training step with data parallelism (DDP) or FSDP2.

1. Every token of the batch is computed once per pass; the only waste is ``padding_frac`` of the
   rows.
2. Memory is counted per GPU (`libra.planner.cost.training_memory`): FSDP2 divides what it shards by
   the number of GPUs, and data parallelism divides nothing.
3. A step that does not fit is returned with ``fits`` false and negative ``headroom_bytes``, never
   shrunk.

Tensor, pipeline and expert parallelism are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.hardware import GPU, Efficiencies, ModelShape
from libra.hardware.layer_seconds import all_reduce_s, attention_prefill_s, layer_s, operator_s
from libra.planner.cost.training_memory import WIDE_BYTES, Layout, MicroBatchSize, step_bytes

Array = NDArray[np.float64]

BACKWARD_OVER_FORWARD = 2.0
"""Backward over forward pass time: each matrix product has two gradients, of input and of weight.

Measured 1.97 for Llama-3-8B on a GH200 without tensor parallelism (eth-easl/sailor, MIT).
"""
OVERLAP_FRAC = 0.5
"""Share of FSDP2's communication hidden behind computation; DDP reduces after the last micro-batch."""
HOST_BYTES_PER_S = 20.0e9
"""Effective bandwidth of PCIe 4.0 x16 in one direction."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of a training step on ``num_gpus`` GPUs; memory is of the fullest GPU."""

    num_gpus: int
    step_s: float  # the next three, plus forward passes before the update
    forward_backward_s: float
    communication_s: float  # not hidden by computation
    optimizer_s: float  # including offload transfers
    memory_bytes: float
    headroom_bytes: float
    memory_parts_bytes: dict[str, float]

    @property
    def fits(self) -> bool:
        """Whether the step fits into the fullest GPU."""
        return self.headroom_bytes >= 0


def training_cost(
    gpu: GPU,
    shape: ModelShape,
    sequence_tokens: Array,
    num_gpus: int,
    layout: Layout | None = None,
    *,
    forward_s: Array | None = None,
) -> TrainingCost:
    """Seconds and bytes of a step over sequences of these lengths (n,), prompts included.

    ``forward_s`` (n,) is `sequences_s` of the same arguments, to share it between numbers of GPUs.
    """
    layout = layout or Layout()
    if gpu.gpus_per_node < num_gpus and num_gpus % gpu.gpus_per_node:
        nodes = -(-num_gpus // gpu.gpus_per_node)
        raise ConfigError(
            f"num_gpus: got {num_gpus}; more than one node of {gpu.gpus_per_node} takes whole nodes, e.g. "
            f"{nodes * gpu.gpus_per_node}"
        )
    if forward_s is None:
        forward_s = sequences_s(gpu, shape, sequence_tokens, layout)
    forward = float(max(forward_s.sum() / num_gpus, forward_s.max()))  # a sequence is never cut
    again = 1.0 if layout.gradient_checkpointing else 0.0
    update = layout.epochs * forward * (1.0 + again + BACKWARD_OVER_FORWARD)
    logprobs = forward * (layout.recompute_logprobs + layout.reference)
    communication = _communication_s(gpu, shape, sequence_tokens, num_gpus, layout)
    hidden = min(OVERLAP_FRAC * communication, update + logprobs) if layout.kind == "fsdp2" else 0.0
    optimizer = _optimizer_s(gpu, shape, num_gpus, layout)
    parts = memory_parts_bytes(shape, sequence_tokens, num_gpus, layout)
    memory = sum(parts.values())
    return TrainingCost(
        num_gpus=num_gpus,
        step_s=update + logprobs + communication - hidden + optimizer,
        forward_backward_s=update,
        communication_s=communication - hidden,
        optimizer_s=optimizer,
        memory_bytes=memory,
        headroom_bytes=gpu.memory_bytes - memory,
        memory_parts_bytes=parts,
    )


def training_table(
    gpu: GPU, shape: ModelShape, sequence_tokens: Array, gpu_counts: list[int], layout: Layout | None = None
) -> dict[int, TrainingCost]:
    """`training_cost` for each number of GPUs, including those on which the step does not fit."""
    each_s = sequences_s(gpu, shape, sequence_tokens, layout or Layout())
    return {num: training_cost(gpu, shape, sequence_tokens, num, layout, forward_s=each_s) for num in gpu_counts}


def sequences_s(gpu: GPU, shape: ModelShape, sequence_tokens: Array, layout: Layout) -> Array:
    """(n,) forward seconds of each sequence on one GPU; causal attention is quadratic in length."""
    eff, micro_batch = Efficiencies(), float(layout.micro_batch_tokens)
    layer, head = layer_s(gpu, eff, shape, 1, micro_batch), operator_s(gpu, eff, shape, 1, "lm_head", micro_batch)
    token_s = float(shape.num_layers * layer + head) / micro_batch / (1.0 - layout.padding_frac)
    attention = attention_prefill_s(gpu, eff, sequence_tokens, 0.0, shape.num_heads, shape.head_dim)
    return np.asarray(token_s * sequence_tokens + shape.num_layers * attention)


def _communication_s(gpu: GPU, shape: ModelShape, sequence_tokens: Array, num_gpus: int, layout: Layout) -> float:
    """DDP: an all-reduce per optimizer step. FSDP2, per micro-batch: an all-gather for forward, one
    for backward, and a reduce-scatter; each is half an all-reduce."""
    if num_gpus == 1:
        return 0.0
    per_node = min(num_gpus, gpu.gpus_per_node)

    def reduce_s(num_bytes: float) -> float:
        return float(all_reduce_s(gpu, Efficiencies(), num_bytes, num_gpus, per_node))

    grads = shape.num_params * max(layout.weight_bytes, WIDE_BYTES)  # reduced in float32 at least
    if layout.kind == "ddp":
        return layout.optimizer_steps * reduce_s(grads)
    weights = shape.num_params * layout.weight_bytes
    batch_tokens = float(sequence_tokens.sum()) / (1.0 - layout.padding_frac)
    micro_batches = max(1.0, np.ceil(batch_tokens / num_gpus / layout.micro_batch_tokens))
    passes = layout.epochs * 2 + layout.recompute_logprobs
    return float(micro_batches * (passes * reduce_s(weights) / 2 + layout.epochs * reduce_s(grads) / 2))


def _optimizer_s(gpu: GPU, shape: ModelShape, num_gpus: int, layout: Layout) -> float:
    """Optimizer states are read and written once, at memory bandwidth, or over PCIe with offload."""
    sharded = shape.num_params / layout.shards(num_gpus)
    moved = sharded * (2 * layout.optimizer_bytes + layout.grad_bytes + layout.weight_bytes)
    seconds = moved / (0.8 * gpu.memory_bytes_per_s)
    if layout.offload:
        seconds += 2 * sharded * layout.optimizer_bytes / HOST_BYTES_PER_S
    return layout.optimizer_steps * seconds


def memory_parts_bytes(shape: ModelShape, sequence_tokens: Array, num_gpus: int, layout: Layout) -> dict[str, float]:
    """Bytes on one GPU at the fullest moment of a step, by content."""
    sizes = micro_batch_sizes(sequence_tokens, num_gpus, layout)
    each = [step_bytes(shape, size, layout, num_gpus) for size in sizes]
    fullest = max(each, key=lambda parts: sum(parts.values()))
    return {**fullest, "runtime": layout.runtime_bytes}


def micro_batch_sizes(sequence_tokens: Array, num_gpus: int, layout: Layout) -> list[MicroBatchSize]:
    """Micro-batches of `libra.train.packing` that may take the most memory, widest rows first.

    Rows with several sequences count as full: only their mean fill is known here.
    """
    limit = min(layout.max_row_tokens, layout.micro_batch_tokens)
    tokens = np.sort(np.asarray(sequence_tokens, np.float64))[::-1]
    short = tokens[tokens <= limit]
    packed = len(short) > 1 and float(short[-2:].sum()) <= limit
    alone = tokens[tokens > limit] if packed else tokens
    rows = np.full(int(np.ceil(short.sum() / limit)), min(float(limit), float(short.sum()))) if packed else np.zeros(0)
    steps = layout.minibatches * num_gpus
    found = []
    for widths, masked in ((alone, False), (rows, True)):
        mine = widths[::steps]  # slices are balanced: every worker has some of the long ones
        if not len(mine):
            continue
        at_once = np.clip(np.floor(layout.micro_batch_tokens / mine), 1, np.arange(len(mine), 0, -1))
        number = np.ceil(mine.sum() / layout.micro_batch_tokens)
        for weight in (at_once * mine, at_once * mine * mine):  # most tokens, and largest mask
            at = int(np.argmax(weight))
            num_rows, width = float(at_once[at]), float(mine[at])
            scored = num_rows * width * layout.generated_frac
            found.append(MicroBatchSize(num_rows, width, scored, masked, max(float(number), 1.0)))
    several = len(alone) > 0 and len(rows) > 0
    return [replace(size, first_of=size.first_of + several) for size in found]
