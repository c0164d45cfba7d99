"""The core: training replicas in one torch.distributed group, fixed for an epoch.

Losing a member ends the epoch: collectives of the others raise GroupLost, and a new group continues
from the last step that all had taken. Members meet at a key-value store of rank 0, by
`libra.transport` with the group's token, because torch's own store trusts all clients. A model is
whole on each member (``ddp``) or in shards (``fsdp2``, torch's `fully_shard`).

1. A value in the store is set whole, and a member that waits for its key gets it at once.
2. A request without its key raises RuntimeError after the store's timeout, as torch's stores do.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from libra.errors import GroupLost, TrainError, TransportError
from libra.train.replica_settings import TrainSettings
from libra.transport import Address, Channel, Server, connect

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PURPOSE = "rendezvous"
RETRY_S = 0.05


class Rendezvous:
    """The key-value store on rank 0; members connect to ``address``. Port 0 is any free port."""

    def __init__(self, token: str, host: str, port: int = 0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._server = Server(self._serve, secret=token, purpose=PURPOSE, host=host, port=port, silence_s=None)
        self.address: Address = self._server.address

    def close(self) -> None:
        """End the connections of all members; their requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()

    def _serve(self, channel: Channel, client: str) -> None:
        while (request := channel.recv_frame()) is not None:
            channel.send_frame(**self._answer(**request))

    def _answer(
        self, do: str, keys: list[str], value: str = "", number: int = 0, timeout_s: float = 0
    ) -> dict[str, Any]:
        with self._changed:
            match do:
                case "set":
                    self._values[keys[0]] = base64.b64decode(value)
                    self._changed.notify_all()
                    return {}
                case "add":
                    found = int(self._values.get(keys[0], b"0")) + number
                    self._values[keys[0]] = b"%d" % found
                    self._changed.notify_all()
                    return {"number": found}
                case "delete":
                    return {"number": int(self._values.pop(keys[0], None) is not None)}
                case "count":
                    return {"number": len(self._values)}
                case "check":
                    return {"number": int(all(key in self._values for key in keys))}
                case "get":
                    there = lambda: self._closed or all(key in self._values for key in keys)  # noqa: E731
                    if not self._changed.wait_for(there, timeout_s) or self._closed:
                        missing = [key for key in keys if key not in self._values]
                        return {"error": f"waited {timeout_s:g} s for {', '.join(missing)}"}
                    return {"values": [base64.b64encode(self._values[key]).decode() for key in keys]}
        return {"error": f"unknown request {do!r}"}


class MemberStore(dist.Store):
    """A member's end of a `Rendezvous`, for ``torch.distributed.init_process_group``."""

    def __init__(self, address: Address, token: str, timeout_s: float) -> None:
        """TransportError if no server with ``token`` answers within ``timeout_s``."""
        super().__init__()
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self._channel = connect(address, token, purpose=PURPOSE, silence_s=None)
                return
            except TransportError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_S)  # rank 0 may listen only later

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", [key], value=base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._wait([key], self._timeout_s)["values"][0])

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", [key], number=number)["number"])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(list(keys), self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys))["number"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key])["number"])

    def num_keys(self) -> int:
        return int(self._ask("count", [])["number"])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    deleteKey, getNumKeys = delete_key, num_keys  # names in torch's C++

    def _wait(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        return self._ask("get", keys, timeout_s=timeout_s)

    def _ask(self, do: str, keys: list[str], **arguments: Any) -> dict[str, Any]:
        try:
            with self._lock:
                self._channel.send_frame(do=do, keys=keys, **arguments)
                answer = self._channel.recv_frame()
        except TransportError as error:
            raise RuntimeError(f"the rendezvous of the group is gone: {error}") from error
        if answer is None or "error" in answer:
            raise RuntimeError(str((answer or {}).get("error", "rank 0 has closed the rendezvous")))
        return answer


logger = logging.getLogger(__name__)
BUCKET_BYTES = 64 * 2**20
"""Tensors are reduced in buckets of about this size."""
TIMEOUT_S = 60.0
"""Longest wait for a silent member; a killed member is noticed at once."""


class TrainGroup:
    """A member's view of its group; a group of one needs no torch.distributed."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._members: MemberStore | None = None  # kept alive here: torch has no reference

    @classmethod
    def join(
        cls,
        address: tuple[str, int],
        rank: int,
        size: int,
        *,
        token: str,
        epoch: int = 0,
        timeout_s: float = TIMEOUT_S,
        on_gpus: bool = False,
    ) -> TrainGroup:
        """Become member ``rank`` of the group of ``epoch``; returns when all members have joined.

        ``address`` is the `Rendezvous` of rank 0. Each member proves that it knows ``token``, over
        the connections that gradients will take. A process first leaves the group of an older
        epoch. GroupLost if a member did not join within ``timeout_s``, or did not prove itself.
        """
        if dist.is_initialized():
            cls._destroy()
        host, port = address
        if _is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if on_gpus else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        with _lost(f"rank {rank} of {size} at {host}:{port}"):
            members = MemberStore(address, token, timeout_s)
            kept = _store_on_gpus(members, host, rank, size, timeout) if on_gpus else members
            store = dist.PrefixStore(f"libra-{epoch}", kept)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        group = cls(rank, size)
        group._members = members
        group._check_members(token, epoch)
        return group

    def _check_members(self, token: str, epoch: int) -> None:
        said = f"libra group {epoch} {self.size} ".encode() + b"".join(self._gather_bytes(secrets.token_bytes(32)))

        def proof(rank: int) -> bytes:
            return hmac.digest(token.encode(), said + b" %d" % rank, "sha256")

        shown = self._gather_bytes(proof(self.rank))
        strangers = [rank for rank, each in enumerate(shown) if not hmac.compare_digest(each, proof(rank))]
        if strangers:
            self.leave()
            raise GroupLost(
                f"training group: rank {strangers[0]} of {self.size} did not prove that it knows the run's secret"
            )

    def leave(self) -> None:
        """Destroy the group; the other members get GroupLost."""
        if self.size > 1 and dist.is_initialized():
            self._destroy()

    @staticmethod
    def _destroy() -> None:
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as fault:  # of a group whose members died
            logger.info("a broken process group was left: %s", fault)

    def sum_(self, tensors: Sequence[Tensor]) -> int:
        """Replace tensors by sums over members, equal on all, >= float32; returns bytes reduced."""
        return self._in_buckets(tensors, lambda flat: dist.all_reduce(flat))

    def send_(self, tensors: Sequence[Tensor], source: int = 0) -> int:
        """Replace each tensor by the tensor of rank ``source``; returns bytes sent."""
        return self._in_buckets(tensors, lambda flat: dist.broadcast(flat, source))

    def _in_buckets(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any]) -> int:
        if self.size == 1:
            return 0
        total = 0
        for bucket in _buckets(tensors):
            dtype = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in bucket])
            with _lost(f"rank {self.rank} of {self.size}"):
                collective(flat)
            total += flat.numel() * flat.element_size()
            at = 0
            for tensor in bucket:
                tensor.detach().copy_(flat[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()
        return total

    def gather(self, value: Any) -> list[Any]:
        """The values (JSON-able) of all members, by rank."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        lengths = [int.from_bytes(each) for each in self._gather_bytes(len(data).to_bytes(8))]
        parts = self._gather_bytes(data.ljust(max(lengths)))
        return [json.loads(part) for part in parts]

    def _gather_bytes(self, value: bytes) -> list[bytes]:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        data = torch.tensor(list(value), dtype=torch.uint8, device=device)
        parts = [torch.zeros_like(data) for _ in range(self.size)]
        with _lost(f"rank {self.rank} of {self.size}"):
            dist.all_gather(parts, data)
        return [bytes(part.tolist()) for part in parts]

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]


def _store_on_gpus(members: MemberStore, host: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.TCPStore:
    # torch's own store, which NCCL uses from threads without Python; `TrainGroup._check_members` verifies its clients.
    if rank:
        port = int(members.get("port"))
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(host, port, size, is_master=True, **options)
    members.set("port", str(port))
    return store


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + num_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


@contextmanager
def _lost(where: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TransportError) as fault:  # torch.distributed's own errors are all of the first kind
        raise GroupLost(
            f"training group: {where} could not reach the others: {str(fault).splitlines()[0]}; a new group repeats the "
            "step, from the last one that all had taken"
        ) from fault


def lost_connection(error: RuntimeError) -> bool:
    """Whether an error of a pass over shards is a lost connection (gloo has no error type)."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -------------------------------------------------------------------- the layout of a model on its group


def is_sharded(settings: TrainSettings, group: TrainGroup) -> bool:
    """Whether each replica holds a part of every tensor, so that its passes are collectives."""
    return settings.layout != "ddp" and group.size > 1


def shard(model: Any, group: TrainGroup, *, offload: bool) -> None:
    """Shard ``model`` over the group in place, by decoder layer; with ``offload`` into host memory.
    TrainError if the architecture has no list of layers to shard by."""
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
            part.set_gradient_divide_factor(1.0)  # sums, because the divisor is known only after the last sum
            part.set_force_sum_reduction_for_comms(True)  # gloo and some NCCL cannot scale while they reduce


def release(model: Any) -> None:
    """Drop whole parameters left by a sharded pass, so that the next pass reads the shards."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    for part in model.modules():
        if isinstance(part, module.FSDPModule):
            part.reshard()


def checkpoint_activations(model: Any) -> None:
    """Make every decoder layer keep only its input and recompute the rest, with the same result.
    transformers reads the layer's own training flag; dropout below remains off."""
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
