"""The layout of a model on the replicas of its group: whole on each (``ddp``) or in shards (``fsdp2``).

``ddp`` reduces undivided gradients once per optimizer step, after the last micro-batch. ``fsdp2`` is
torch's `fully_shard`, layer by layer; gradients are sums too, scattered in the backward pass.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from libra.errors import TrainError
from libra.train.replica_group import TrainGroup
from libra.train.replica_settings import TrainSettings

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(settings: TrainSettings, group: TrainGroup) -> bool:
    """Whether each replica holds a part of every tensor, so that its passes are collectives."""
    return settings.layout != "ddp" and group.size > 1


def shard(model: Any, group: TrainGroup, *, offload: bool) -> None:
    """Shard ``model`` over the group in place, by decoder layer; with ``offload`` into host memory.

    TrainError if the architecture has no list of layers to shard by.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (group.size,))
    layers = _layers(model)
    if not layers:
        raise TrainError(f"trainer.layout: fsdp2 found no list of decoder layers in {type(model).__name__}; type ddp")
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    dtype = next(model.parameters()).dtype
    wide = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=None if wide is dtype else wide)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, offload_policy=policy, mp_policy=precision)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # sums: their divisor is known after the last of them
            part.set_force_sum_reduction_for_comms(True)  # gloo and some NCCL cannot scale while they reduce


def release(model: Any) -> None:
    """Drop whole parameters that a pass of a sharded model has left, so that the next reads the shards."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    for part in model.modules():
        if isinstance(part, module.FSDPModule):
            part.reshard()


def checkpoint_activations(model: Any) -> None:
    """Make every decoder layer keep only its input and recompute the rest; the result does not change.

    transformers reads the layer's own training flag; dropout below remains off.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise TrainError(
            f"trainer.gradient_checkpointing: {type(model).__name__} does not support it; type "
            "trainer.gradient_checkpointing=false and a smaller trainer.micro_batch_tokens"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective if it is sharded."""
    return tensor.full_tensor() if in_shards(tensor) else tensor  # type: ignore[no-untyped-call]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this replica, as a view."""
    return tensor.to_local() if in_shards(tensor) else tensor  # type: ignore[no-untyped-call,no-any-return]


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of ``full`` on this replica under the layout of ``like``."""
    if not in_shards(like):
        return full
    mesh = like.device_mesh
    parts = full.chunk(mesh.size(), 0)  # fully_shard cuts the first axis as torch.chunk does
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else full[:0]


def laid_out(full: Tensor, like: Tensor) -> Tensor:
    """A copy of ``full``, which every replica has, in the layout of ``like``."""
    mine = part_of(full, like).clone()
    if not in_shards(like):
        return mine
    return type(like).from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def add_(target: torch.nn.Parameter, full: Tensor) -> None:
    """Add ``full``, which every replica has, to the gradient of ``target``."""
    full = full.to(device=target.device, dtype=target.dtype)
    if target.grad is None:
        target.grad = laid_out(full, target.detach())
    else:
        local(target.grad).add_(part_of(full, target))


def in_shards(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is sharded."""
    # Importing its class takes half a second; before that nothing is sharded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _layers(model: Any) -> list[Any]:
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])
