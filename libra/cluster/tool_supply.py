"""What one tool worker has for tools that declare resources: cores, memory and GPUs, as configured or as its machine has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from libra.cluster.gpu_names import VisibleGpu
from libra.config import RunConfig


class ToolSupply(NamedTuple):
    """Of one tool worker. ``core_ids``: those that it leases; ``mib``: memory in MiB; ``gpus``: those of calls, at once."""

    core_ids: tuple[int, ...]
    mib: int
    gpus: int


def tool_supply(config: RunConfig, index: int = 0) -> ToolSupply:
    """Of tool worker ``index`` on this machine. Tool workers of a local cluster share it evenly, at least a core each."""
    cluster = config.cluster
    local = cluster.scheduler is None
    share = (cluster.tool_workers_most or cluster.tool_workers) if local else 1
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = cluster.tool_cores or max(1, len(usable) // share)
    first = index * count if local else 0
    core_ids = tuple(usable[(first + i) % len(usable)] for i in range(min(count, len(usable))))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // share
    if cluster.tool_memory_gib is not None:
        memory_bytes = round(cluster.tool_memory_gib * 2**30)
    return ToolSupply(core_ids, memory_bytes >> 20, cluster.tool_gpus)


def tool_gpus(config: RunConfig, index: int, seen: Sequence[VisibleGpu]) -> tuple[VisibleGpu, ...]:
    """GPUs for calls of tools on tool worker ``index``, which sees ``seen``. Tool workers of a local cluster have different ones,
    as far as there are enough."""
    count = min(config.cluster.tool_gpus, len(seen))
    first = index * count if config.cluster.scheduler is None else 0
    return tuple(seen[(first + i) % len(seen)] for i in range(count))
