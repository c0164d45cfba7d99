"""What one tool worker has for tools that declare resources: cores, memory and GPUs, as configured or as its machine has them."""

from __future__ import annotations

import os
from typing import NamedTuple

from libra.config import RunConfig


class ToolSupply(NamedTuple):
    """Of one tool worker. ``core_ids``: those that it leases; ``mib``: memory in MiB."""

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
