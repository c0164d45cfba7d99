"""Peak bytes on one training worker during a step of `libra.train.replica`.

The estimate is the largest of these moments; no term is fitted::

  standing   weights, optimizer states, earlier micro-batches' gradients, reference model, backup
  head       + activations kept by every layer, logits of a chunk, gradient of the output matrix
  layer      + kept activations and one layer's gradient (a checkpointed layer is recomputed)
  embedding  + all gradients, and a second gradient of an embedding tied to the head
  reduce     + all gradients, and the bucket being summed (ddp) or the last unsharded gradient (fsdp2)
  publish    standing + all weights on the host, if sharded (fsdp2)

A layer keeps what autograd holds for transformers' Llama and Qwen decoders with torch's scaled dot
product attention; norms compute in float32 and keep that copy.

Symbols: P parameters, V vocabulary, H hidden size, F feed-forward size, Q and K width of all query
and all key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware import ModelShape

LayoutKind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a training step on one training worker."""

    kind: LayoutKind = "fsdp2"  # ddp: full copies; fsdp2: weights, gradients and optimizer states sharded
    gradient_checkpointing: bool = True  # keep each layer's input only, recompute its forward in backward
    recompute_logprobs: bool = False  # extra forward pass for the policy's own log-probabilities
    reference: bool = False  # extra forward pass of a frozen model, held whole on each GPU
    offload: bool = False  # fsdp2: shards stay in host memory and move over PCIe
    micro_batch_tokens: int = 16384  # per forward pass and GPU
    max_row_tokens: int = 1  # sequences are packed into masked rows of this length; a longer one has its own row
    generated_frac: float = 1.0  # share of tokens that are scored
    logit_chunk_tokens: int = 1024  # tokens whose logits are held at once (`libra.train.logprobs`)
    entropy_bonus: bool = False
    epochs: int = 1  # passes over the batch
    minibatches: int = 1  # optimizer steps per pass
    weight_bytes: int = 2  # of one weight in forward and backward passes
    master_bytes: int | None = 4  # of the optimizer's copy of one weight; None: no copy
    on_cpu: bool = False
    runtime_bytes: float = 2.0e9  # outside tensors: driver context, NCCL buffers, fragmentation
    padding_frac: float = 0.03  # share of the rows that is padding

    def shards(self, num_gpus: int) -> int:
        """Workers that share weights, gradients and optimizer states; 1 if each has full copies."""
        return num_gpus if self.kind == "fsdp2" else 1

    @property
    def grad_bytes(self) -> int:
        """Bytes of one gradient element summed over micro-batches."""
        return self.master_bytes or self.weight_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's copy of one weight and of AdamW's two moments."""
        return (self.master_bytes or 0) + 2 * self.grad_bytes

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch; weights and states are backed up if there are several."""
        return self.epochs * self.minibatches


BUCKET_BYTES = 64 * 2**20
"""Gradients are summed in buckets of this size or one tensor, as in `libra.train.replica_group`."""
WIDE_BYTES = 4
"""Bytes of float32, in which norms, log-probabilities and sums are always kept."""


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The micro-batch that takes the most memory: rows, padded row width, and scored tokens.

    ``masked``: rows hold several sequences, so that attention has a mask of row_tokens x
    row_tokens. ``first_of`` is the number of micro-batches per optimizer step here; above 1,
    earlier gradients are in memory.
    """

    rows: float
    row_tokens: float
    action_tokens: float
    masked: bool = False
    first_of: float = 1.0

    @property
    def places(self) -> float:
        """Rows times padded width."""
        return self.rows * self.row_tokens


def kept_per_token(shape: ModelShape, weight_bytes: int, mask_tokens: float = 0.0) -> float:
    """Bytes that one layer keeps per token for backward; ``mask_tokens`` is the width of a masked row."""
    w, queries, keys = weight_bytes, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = 2 * (WIDE_BYTES * shape.hidden + WIDE_BYTES + 2 * shape.hidden * w)
    if shape.qk_norm:
        norms += (queries + keys) * (WIDE_BYTES + w) + WIDE_BYTES * (shape.num_heads + shape.num_kv_heads)
    read = 2 * (queries if mask_tokens else keys)  # with a mask, keys and values are copied for every query head
    attention = (2 * queries + read + mask_tokens) * w + WIDE_BYTES * shape.num_heads
    return norms + attention + 4 * shape.ffn * w


def step_bytes(shape: ModelShape, size: MicroBatchSize, layout: Layout, num_gpus: int = 1) -> dict[str, float]:
    """Bytes by content at the fullest moment of a step after the first."""
    moments = _moments(shape, size, layout, num_gpus)
    fullest = max(moments.values(), key=lambda parts: sum(parts.values()))
    return {
        **_standing(shape, layout, num_gpus),
        **dict.fromkeys(("gradients", "activations", "logits", "gathered"), 0.0),
        **fullest,
    }


def fullest_moment(shape: ModelShape, size: MicroBatchSize, layout: Layout, num_gpus: int = 1) -> str:
    """Name of the fullest moment of a step."""
    moments = _moments(shape, size, layout, num_gpus)
    return max(moments, key=lambda name: sum(moments[name].values()))


def _standing(shape: ModelShape, layout: Layout, num_gpus: int) -> dict[str, float]:
    shards = layout.shards(num_gpus)
    away = layout.offload and shards > 1 and not layout.on_cpu
    mine = 0.0 if away else shape.num_params / shards
    wide = layout.grad_bytes
    return {
        "weights": mine * layout.weight_bytes,
        "optimizer": mine * layout.optimizer_bytes,
        "reference": float(shape.num_params * layout.weight_bytes) if layout.reference else 0.0,
        "backup": mine * 3 * wide if layout.optimizer_steps > 1 else 0.0,
    }


def _moments(shape: ModelShape, size: MicroBatchSize, layout: Layout, num_gpus: int) -> dict[str, dict[str, float]]:
    """Bytes beyond the standing ones, by moment and content."""
    shards = layout.shards(num_gpus)
    w, sharded = layout.weight_bytes, shards > 1
    ends = float(shape.vocab * shape.hidden) * (2 - shape.tied) + shape.hidden
    gathered = ends * w if sharded else 0.0  # embedding, last norm and head stay whole from forward to backward
    all_grads = shape.num_params * layout.grad_bytes / shards
    before = size.first_of > 1
    moments = _moments_of_layers(shape, size, layout, shards, gathered, all_grads if before else 0.0)
    matrix, wide_w, layer = float(shape.vocab * shape.hidden), max(w, WIDE_BYTES), float(shape.layer_params * w)
    if sharded:
        before_own = all_grads - (0.0 if before else ends * layout.grad_bytes / shards)
        moments["embedding"] = {
            "gradients": before_own + 2 * matrix * w,
            "gathered": gathered + layer * wide_w / w,  # the last layer's gradient is being summed
        }
        # fully_shard frees the whole weights, copies their gradient in float32, frees that; gloo copies it once more.
        summed = ends * max(w + wide_w, 2 * wide_w if layout.on_cpu else 0)
        moments["reduce"] = {"gradients": all_grads + summed, "gathered": layer * wide_w / w}
        moments["publish"] = {"gathered": float(shape.num_params * w) if layout.on_cpu else matrix * w}
        return moments
    at_once = (2 if shape.tied else 1) * matrix * w
    moments["embedding"] = {"gradients": all_grads + at_once - (0.0 if before else matrix * w)}
    if num_gpus > 1:
        moments["reduce"] = {"gradients": all_grads, "reduced": max(float(BUCKET_BYTES), matrix * wide_w)}
    return moments


def _moments_of_layers(
    shape: ModelShape, size: MicroBatchSize, layout: Layout, shards: int, gathered: float, grads_before: float
) -> dict[str, dict[str, float]]:
    """Moments of head and layers; ``grads_before``: bytes of earlier micro-batches' gradients."""
    w, wide_w, layers, sharded = (
        layout.weight_bytes,
        max(layout.weight_bytes, WIDE_BYTES),
        shape.num_layers,
        shards > 1,
    )
    places, matrix, layer = size.places, float(shape.vocab * shape.hidden), float(shape.layer_params * w)
    kept = kept_per_token(shape, w, size.row_tokens if size.masked else 0.0)
    outside = places * (16 + 2 * shape.head_dim * w + WIDE_BYTES * (shape.hidden + 1) + shape.hidden * w)
    outside += size.rows * size.row_tokens**2 if size.masked else 0.0  # the mask, one byte per token pair
    scored = size.action_tokens * (shape.hidden * w + 60)
    held = places * shape.hidden * w if layout.gradient_checkpointing else places * kept
    moving = places * (2 * shape.ffn + 2 * shape.hidden) * w  # gradients inside one feed-forward network
    chunk = min(size.action_tokens, float(layout.logit_chunk_tokens)) * shape.vocab
    narrow_w = w if w < WIDE_BYTES else 0  # the copy in the weights' own dtype
    # The head's gradient waits for a tied embedding's, or for its shards.
    own_head = matrix * w if shape.tied or sharded or not grads_before else 0.0
    # Gathered: this layer and the next one, and the gradient of the last one while it is summed.
    in_flight = gathered + ((2 + wide_w / w) * layer if sharded else 0.0)
    again = places * kept + moving if layout.gradient_checkpointing else moving
    behind = 0.0 if grads_before else layers * layer / w * layout.grad_bytes / shards
    moments = {
        "reference" if layout.reference else "head, forward": {
            "activations": layers * held + outside + scored + (moving if layout.reference else 0.0),
            "logits": chunk * 2 * wide_w,
            "gathered": gathered,
        },
        "head": {
            "activations": layers * held + outside + scored + size.action_tokens * shape.hidden * w,
            "logits": chunk * ((2 if layout.entropy_bonus else 1) * wide_w + narrow_w),
            "gradients": matrix * (wide_w + narrow_w),
            "gathered": gathered + (layer if sharded else 0.0),
        },
        "layer, last": {"activations": layers * held + again, "gradients": own_head, "gathered": in_flight},
        "layer, first": {"activations": held + again, "gradients": own_head + behind, "gathered": in_flight},
    }
    for parts in moments.values():
        parts["gradients"] = parts.get("gradients", 0.0) + grads_before
    return moments
