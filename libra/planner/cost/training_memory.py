"""Peak bytes on one training worker during a step: every term is something that torch holds at that moment.

The fullest moment of a step of `libra.train.replica` counts::

    standing   weights, optimizer states, gradients of micro-batches before, a reference model, a backup
    head       + what every layer has kept, logits of a chunk, and the gradient of the output matrix
    layer      + what layers have kept and one layer's gradient in progress (checkpointing: that layer recomputed)
    embedding  + all gradients, and once more the gradient of an embedding that is also the head
    reduce     + all gradients, and the bucket in which they are summed (ddp) or the last of them before it is cut (fsdp2)
    publish    standing + all weights on the host, where they are in shards (fsdp2)

A layer keeps what the autograd graph of transformers' Llama and Qwen decoders holds with torch's scaled dot product
attention: norms work in float32 and keep that copy. No term is fitted.

Symbols: P parameters, V vocabulary, H hidden size, F feed-forward size, Q and K width of all query and all key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware import ModelShape

LayoutKind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a training step; memory is of one training worker."""

    kind: LayoutKind = "fsdp2"  # ddp: copies of everything; fsdp2: weights, gradients and optimizer states sharded
    gradient_checkpointing: bool = True  # keep only each layer's input, compute its forward again in the backward pass
    recompute_logprobs: bool = False  # one more forward pass before each step, for the policy's own log-probabilities
    reference: bool = False  # one more forward pass for a frozen model, whose weights are held whole on each GPU
    offload: bool = False  # fsdp2: shards are in the host's memory and are transferred over PCIe
    micro_batch_tokens: int = 16384  # of one forward pass on one GPU
    max_row_tokens: int = 1  # sequences are packed into rows of this length, with a mask; a longer one has its own row
    generated_frac: float = 1.0  # share of the tokens that is scored
    logit_chunk_tokens: int = 1024  # tokens whose logits are held at once (`libra.train.logprobs`)
    entropy_bonus: bool = False
    epochs: int = 1  # passes over the batch
    minibatches: int = 1  # optimizer steps per pass
    weight_bytes: int = 2  # of a weight in forward and backward passes
    master_bytes: int | None = 4  # of the optimizer's copy of it; None: it updates the weights
    on_cpu: bool = False
    runtime_bytes: float = 2.0e9  # besides tensors: the driver's context, NCCL's buffers, fragmentation
    padding_frac: float = 0.03  # share of the rows that is padding

    def shards(self, num_gpus: int) -> int:
        """Workers that weights, gradients and optimizer states are sharded over; 1: each has them all."""
        return num_gpus if self.kind == "fsdp2" else 1

    @property
    def grad_bytes(self) -> int:
        """Of one element of a gradient that is summed over micro-batches."""
        return self.master_bytes or self.weight_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's copy of a weight and AdamW's two moments."""
        return (self.master_bytes or 0) + 2 * self.grad_bytes

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one batch; before the second one, weights and states are backed up."""
        return self.epochs * self.minibatches


BUCKET_BYTES = 64 * 2**20
"""`libra.train.replica_group`: gradients are summed in buckets of this size, or one tensor."""
WIDE_BYTES = 4
"""float32: norms, log-probabilities and sums are always kept in it."""


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The forward pass that takes most memory: rows, their width with padding, and tokens that are scored.

    ``masked``: rows hold several sequences, so attention has a mask of row_tokens x row_tokens. ``first_of`` counts the
    micro-batches of one optimizer step here; from the second one on, gradients of earlier ones are in memory.
    """

    rows: float
    row_tokens: float
    action_tokens: float
    masked: bool = False
    first_of: float = 1.0

    @property
    def places(self) -> float:
        """Rows times width."""
        return self.rows * self.row_tokens


def kept_per_token(shape: ModelShape, weight_bytes: int, mask_tokens: float = 0.0) -> float:
    """Bytes that one layer keeps of a token for its backward pass; ``mask_tokens``: width of a row that has a mask."""
    w, queries, keys = weight_bytes, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = 2 * (WIDE_BYTES * shape.hidden + WIDE_BYTES + 2 * shape.hidden * w)
    if shape.qk_norm:
        norms += (queries + keys) * (WIDE_BYTES + w) + WIDE_BYTES * (shape.num_heads + shape.num_kv_heads)
    read = 2 * (queries if mask_tokens else keys)  # with a mask, keys and values are copied for every query head
    attention = (2 * queries + read + mask_tokens) * w + WIDE_BYTES * shape.num_heads
    return norms + attention + 4 * shape.ffn * w


def step_bytes(shape: ModelShape, size: MicroBatchSize, layout: Layout, num_gpus: int = 1) -> dict[str, float]:
    """Bytes by content, at the fullest moment of a step after the first."""
    moments = _moments(shape, size, layout, num_gpus)
    fullest = max(moments.values(), key=lambda parts: sum(parts.values()))
    return {
        **_standing(shape, layout, num_gpus),
        **dict.fromkeys(("gradients", "activations", "logits", "gathered"), 0.0),
        **fullest,
    }


def fullest_moment(shape: ModelShape, size: MicroBatchSize, layout: Layout, num_gpus: int = 1) -> str:
    """Name of that moment."""
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
    """Bytes besides the standing ones, by moment and content."""
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
    """The moments of head and layers, forward and backward; ``grads_before``: bytes of gradients of earlier micro-batches."""
    w, wide_w, layers, sharded = (
        layout.weight_bytes,
        max(layout.weight_bytes, WIDE_BYTES),
        shape.num_layers,
        shards > 1,
    )
    places, matrix, layer = size.places, float(shape.vocab * shape.hidden), float(shape.layer_params * w)
    kept = kept_per_token(shape, w, size.row_tokens if size.masked else 0.0)
    outside = places * (16 + 2 * shape.head_dim * w + WIDE_BYTES * (shape.hidden + 1) + shape.hidden * w)
    outside += size.rows * size.row_tokens**2 if size.masked else 0.0  # the mask itself, one byte for each pair
    scored = size.action_tokens * (shape.hidden * w + 60)
    held = places * shape.hidden * w if layout.gradient_checkpointing else places * kept
    moving = places * (2 * shape.ffn + 2 * shape.hidden) * w  # gradients in progress through one feed-forward network
    chunk = min(size.action_tokens, float(layout.logit_chunk_tokens)) * shape.vocab
    narrow_w = w if w < WIDE_BYTES else 0  # the copy in the weights' own dtype
    # The head's gradient waits for the embedding's where they are tied, or for its shards.
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
