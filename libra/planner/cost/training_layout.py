"""The layout of a training step: what is sharded, what is recomputed, how micro-batches are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from libra.errors import ConfigError

LayoutKind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a training step is laid out.

    Attributes
    ----------
    kind : "ddp" or "fsdp2"
        Copies of everything, or weights, gradients and optimizer states sharded over the GPUs: ``trainer.layout``.
    gradient_checkpointing : bool
        Keep only each layer's input and compute its forward again in the backward pass.
    recompute_logprobs : bool
        One additional forward pass before each step, for the policy's own log-probabilities.
    reference : bool
        One additional forward pass for a frozen reference model, whose weights are held whole on each GPU.
    offload : bool
        For fsdp2: shards are in the host's memory and are transferred at ``host_bytes_per_s``.
    micro_batch_tokens : int
        Tokens of one forward pass on one GPU.
    max_row_tokens : int
        Sequences are packed into rows of up to this length, which then have a mask; a longer one has a row of its own.
    generated_frac : float
        Share of the tokens that is scored.
    logit_chunk_tokens : int
        Tokens whose logits are held at once (`libra.train.logprobs`).
    entropy_bonus : bool
    epochs : int
        Passes over the batch.
    minibatches : int
        Optimizer steps per pass.
    weight_bytes : int
        Of a weight in forward and backward passes.
    master_bytes : int or None
        Of the optimizer's copy of it. None: it updates the weights themselves.
    on_cpu : bool
        Training workers without a GPU.
    runtime_bytes : float
        Bytes held besides tensors: the driver's context, NCCL's buffers, what the allocator cannot use.
    padding_frac : float
        Share of the rows that is padding.
    overlap_frac : float
        Share of FSDP2's communication that hides behind computation; data parallel sums after the last micro-batch.
    host_bytes_per_s : float
        One direction of PCIe 4.0 x16 as reached.
    """

    kind: LayoutKind = "fsdp2"
    gradient_checkpointing: bool = True
    recompute_logprobs: bool = False
    reference: bool = False
    offload: bool = False
    micro_batch_tokens: int = 16384
    max_row_tokens: int = 1
    generated_frac: float = 1.0
    logit_chunk_tokens: int = 1024
    entropy_bonus: bool = False
    epochs: int = 1
    minibatches: int = 1
    weight_bytes: int = 2
    master_bytes: int | None = 4
    on_cpu: bool = False
    runtime_bytes: float = 2.0e9
    padding_frac: float = 0.03
    overlap_frac: float = 0.5
    host_bytes_per_s: float = 20.0e9

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ConfigError(
                f"layout.kind: got {self.kind!r}; allowed are {', '.join(get_args(LayoutKind))}: the trainer has no tensor, "
                "pipeline or expert parallelism yet"
            )
        if min(self.micro_batch_tokens, self.logit_chunk_tokens, self.epochs, self.minibatches) < 1:
            raise ConfigError("layout: micro_batch_tokens, logit_chunk_tokens, epochs and minibatches are at least 1")
        if not (0 <= self.padding_frac < 1 and 0 <= self.overlap_frac <= 1):
            raise ConfigError(
                f"layout: padding_frac {self.padding_frac} and overlap_frac {self.overlap_frac} are shares"
            )

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
