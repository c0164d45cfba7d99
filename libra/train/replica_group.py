"""The core: training replicas of one epoch in one torch.distributed group, which nobody joins and nobody leaves.

A member that is lost ends the epoch: what the others wait for fails or times out as GroupLost, and a new group of the
next epoch goes on from the last step that all of it had taken.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from libra.errors import GroupLost

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 * 2**20
"""Tensors are reduced in buckets of about this size."""
TIMEOUT_S = 60.0
"""Longest wait for another member; one that is killed is noticed at once, this is for one that is silent."""


class TrainGroup:
    """A member's view of its group; a group of one needs no torch.distributed.

    Attributes
    ----------
    rank, size : int
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @staticmethod
    def open(host: str, size: int, *, timeout_s: float = TIMEOUT_S) -> dist.TCPStore:
        """Where the members of a group will find each other, at its ``port``; for rank 0, which keeps it."""
        with _lost(f"rank 0 of {size} at {host}"):
            return dist.TCPStore(host, 0, size, is_master=True, timeout=_seconds(timeout_s), wait_for_workers=False)

    @classmethod
    def join(
        cls,
        address: tuple[str, int],
        rank: int,
        size: int,
        *,
        epoch: int = 0,
        timeout_s: float = TIMEOUT_S,
        store: dist.TCPStore | None = None,
        on_gpus: bool = False,
    ) -> TrainGroup:
        """Become member ``rank`` of the group of ``epoch``; returns when all are there.

        Rank 0 listens at ``address``, unless it has a ``store`` that does. A group of an older epoch that this process was in
        is left first: a process is in one group. ``on_gpus``: the tensors of all members are on GPUs, one of its own each.

        Raises
        ------
        GroupLost
            Somebody did not come within ``timeout_s``.
        """
        if dist.is_initialized():
            cls._destroy()
        host, port = address
        if _is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if on_gpus else "gloo"
        timeout = _seconds(timeout_s)
        with _lost(f"rank {rank} of {size} at {host}:{port}"):
            store = store or dist.TCPStore(
                host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
            )
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"libra-{epoch}", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        return cls(rank, size)

    def leave(self) -> None:
        """Take the group down; the others' waiting ends as GroupLost."""
        if self.size > 1 and dist.is_initialized():
            self._destroy()

    @staticmethod
    def _destroy() -> None:
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as fault:  # of a group whose members died
            logger.info("a process group is left that was broken already: %s", fault)

    def sum_(self, tensors: Sequence[Tensor]) -> int:
        """Replace each tensor by its sum over the members, bit for bit the same on all; bytes reduced. At least float32."""
        return self._in_buckets(tensors, lambda flat: dist.all_reduce(flat))

    def send_(self, tensors: Sequence[Tensor], source: int = 0) -> int:
        """Replace each tensor by that of rank ``source``; bytes sent."""
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
        """What each member gave, by rank; JSON-able values."""
        if self.size == 1:
            return [value]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        with _lost(f"rank {self.rank} of {self.size}"):
            dist.all_gather(lengths, torch.tensor([len(data)], device=device))
            padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
            padded[: len(data)] = data
            parts = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded)
        return [json.loads(bytes(part[: int(length)].tolist())) for part, length in zip(parts, lengths, strict=True)]

    def from_first(self, value: Any) -> Any:
        """What rank 0 gave; the others' value is not looked at."""
        return self.gather(value if self.rank == 0 else None)[0]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together at most `BUCKET_BYTES` or one tensor."""
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
    except RuntimeError as fault:  # torch.distributed's own errors are all of this kind
        raise GroupLost(
            f"training group: {where} could not reach the others: {str(fault).splitlines()[0]}; the step is taken again by a "
            "new group from the last step that all had taken"
        ) from fault


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
