"""Bytes on one training worker at the moment of a step when they are most: every term is something that torch holds then.

The step of `libra.train.replica` is gone through moment by moment, and the fullest counts::

    standing   weights, optimizer states, gradients of micro-batches before, a reference model, a backup
    head       + what every layer has kept, logits of a chunk, and the gradient of the output matrix
    layer      + what layers have kept and one layer's gradient on its way (checkpointing: that layer computed again)
    embedding  + all gradients, and twice that of an embedding that is also the head
    reduce     + all gradients, and the bucket in which they are summed (ddp) or the last of them before it is cut (fsdp2)
    publish    standing + all weights on the host, where they are in shards (fsdp2)

What a layer keeps is counted from the autograd graph of transformers' Llama and Qwen decoders with torch's scaled dot product
attention: norms work in float32 and keep that copy. No term is fitted.

Symbols: P parameters, V vocabulary, H hidden size, F feed-forward size, Q and K width of all query and all key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.hardware import ModelShape

BUCKET_BYTES = 64 * 2**20
"""`libra.train.replica_group`: gradients are summed in buckets of this size, or one tensor."""
WIDE_BYTES = 4
"""float32, in which norms, log-probabilities and sums are kept whatever the weights are in."""


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The forward pass that takes most memory.

    Attributes
    ----------
    rows, row_tokens : float
        Rows and their width, padding included.
    action_tokens : float
        Tokens that are scored.
    masked : bool
        Rows hold several sequences, so that attention goes by a mask of row_tokens x row_tokens.
    first_of : float
        Micro-batches of one optimizer step on this worker; from the second on, gradients of those before are there.
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


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What a layout is, as far as bytes depend on it.

    Attributes
    ----------
    shards : int
        Workers that weights, gradients and optimizer states are cut over; 1: each has them all.
    replicas : int
        Workers whose gradients are summed.
    weight_bytes, master_bytes : int, int or None
        Of one weight, and of the optimizer's copy of it where there is one.
    gradient_checkpointing, reference, offload, backup, entropy_bonus : bool
        ``backup``: several optimizer steps of a batch, so that weights and states from before are kept.
    logit_chunk_tokens : int
    on_cpu : bool
        gloo copies what it reduces in shards; nothing can be offloaded from the host to itself.
    """

    shards: int = 1
    replicas: int = 1
    weight_bytes: int = 2
    master_bytes: int | None = 4
    gradient_checkpointing: bool = False
    reference: bool = False
    offload: bool = False
    backup: bool = False
    entropy_bonus: bool = False
    logit_chunk_tokens: int = 1024
    on_cpu: bool = False

    @property
    def grad_bytes(self) -> int:
        """Of one element of a gradient that is summed over micro-batches."""
        return self.master_bytes or self.weight_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's copy of a weight and AdamW's two moments."""
        return (self.master_bytes or 0) + 2 * self.grad_bytes


def kept_per_token(shape: ModelShape, weight_bytes: int, mask_tokens: float = 0.0) -> float:
    """Bytes that one layer keeps of a token for its backward pass; ``mask_tokens``: width of a row that has a mask."""
    w, queries, keys = weight_bytes, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = 2 * (WIDE_BYTES * shape.hidden + WIDE_BYTES + 2 * shape.hidden * w)
    if shape.qk_norm:
        norms += (queries + keys) * (WIDE_BYTES + w) + WIDE_BYTES * (shape.num_heads + shape.num_kv_heads)
    read = 2 * (queries if mask_tokens else keys)  # with a mask, keys and values are copied for every query head
    attention = (2 * queries + read + mask_tokens) * w + WIDE_BYTES * shape.num_heads
    return norms + attention + 4 * shape.ffn * w


def step_bytes(shape: ModelShape, size: MicroBatchSize, options: MemoryOptions) -> dict[str, float]:
    """Bytes by what they hold, at the fullest moment of a step after the first."""
    moments = _moments(shape, size, options)
    fullest = max(moments.values(), key=lambda parts: sum(parts.values()))
    return {
        **_standing(shape, options),
        **dict.fromkeys(("gradients", "activations", "logits", "gathered"), 0.0),
        **fullest,
    }


def fullest_moment(shape: ModelShape, size: MicroBatchSize, options: MemoryOptions) -> str:
    """Name of that moment."""
    moments = _moments(shape, size, options)
    return max(moments, key=lambda name: sum(moments[name].values()))


def _standing(shape: ModelShape, options: MemoryOptions) -> dict[str, float]:
    away = options.offload and options.shards > 1 and not options.on_cpu
    mine = 0.0 if away else shape.num_params / options.shards
    wide = options.grad_bytes
    return {
        "weights": mine * options.weight_bytes,
        "optimizer": mine * options.optimizer_bytes,
        "reference": float(shape.num_params * options.weight_bytes) if options.reference else 0.0,
        "backup": mine * 3 * wide if options.backup else 0.0,
    }


def _moments(shape: ModelShape, size: MicroBatchSize, options: MemoryOptions) -> dict[str, dict[str, float]]:
    w, layers, sharded = options.weight_bytes, shape.num_layers, options.shards > 1
    places, before = size.places, size.first_of > 1
    matrix = float(shape.vocab * shape.hidden)
    ends = matrix * (2 - shape.tied) + shape.hidden
    mine = 1.0 / options.shards
    gathered = ends * w if sharded else 0.0  # embedding, last norm and head stay whole from forward to backward
    layer = float(shape.layer_params * w)
    all_grads = shape.num_params * options.grad_bytes * mine
    grads_before = all_grads if before else 0.0
    kept = kept_per_token(shape, w, size.row_tokens if size.masked else 0.0)
    outside = places * (16 + 2 * shape.head_dim * w + WIDE_BYTES * (shape.hidden + 1) + shape.hidden * w)
    outside += size.rows * size.row_tokens**2 if size.masked else 0.0  # the mask itself, one byte for each pair
    scored = size.action_tokens * (shape.hidden * w + 60)
    held = places * shape.hidden * w if options.gradient_checkpointing else places * kept
    moving = places * (2 * shape.ffn + 2 * shape.hidden) * w  # gradients on their way through one feed-forward network
    chunk = min(size.action_tokens, float(options.logit_chunk_tokens)) * shape.vocab
    narrow = w < WIDE_BYTES
    wide_w = max(w, WIDE_BYTES)
    head_grad = matrix * (wide_w + (w if narrow else 0))
    chunk_forward = chunk * 2 * wide_w
    chunk_backward = chunk * ((2 if options.entropy_bonus else 1) * wide_w + (w if narrow else 0))
    own_head = (
        matrix * w if shape.tied or sharded or not before else 0.0
    )  # waits for the embedding's, or for its shards
    in_flight = (
        (2 + wide_w / w) * layer if sharded else 0.0
    )  # this one and the next, and the last one's gradient being summed
    again = places * kept + moving if options.gradient_checkpointing else moving
    behind = layers * layer / w * options.grad_bytes * mine if not before else 0.0
    moments = {
        "reference" if options.reference else "head, forward": {
            "activations": layers * held + outside + scored + (moving if options.reference else 0.0),
            "logits": chunk_forward,
            "gathered": gathered,
        },
        "head": {
            "activations": layers * held + outside + scored + size.action_tokens * shape.hidden * w,
            "logits": chunk_backward,
            "gradients": head_grad,
            "gathered": gathered + (layer if sharded else 0.0),
        },
        "layer, last": {"activations": layers * held + again, "gradients": own_head, "gathered": gathered + in_flight},
        "layer, first": {"activations": held + again, "gradients": own_head + behind, "gathered": gathered + in_flight},
    }
    for parts in moments.values():
        parts["gradients"] = parts.get("gradients", 0.0) + grads_before
    at_once = (2 if shape.tied else 1) * matrix * w
    if sharded:
        before_own = all_grads - (0.0 if before else ends * options.grad_bytes * mine)
        moments["embedding"] = {
            "gradients": before_own + 2 * matrix * w,
            "gathered": gathered + layer * wide_w / w,  # the last layer's gradient is being summed
        }
        # fully_shard lets the whole weights go, copies their gradient in float32, lets that go; gloo copies it once more.
        summed = ends * max(w + wide_w, 2 * wide_w if options.on_cpu else 0)
        moments["reduce"] = {"gradients": all_grads + summed, "gathered": layer * wide_w / w}
        moments["publish"] = {"gathered": float(shape.num_params * w) if options.on_cpu else matrix * w}
    else:
        moments["embedding"] = {"gradients": all_grads + at_once - (0.0 if before else matrix * w)}
        if options.replicas > 1:
            bucket = max(float(BUCKET_BYTES), matrix * wide_w)
            moments["reduce"] = {"gradients": all_grads, "reduced": bucket}
    return moments
