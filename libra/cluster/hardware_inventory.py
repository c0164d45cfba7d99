"""Hardware of this machine and of a cluster's workers: GPUs, CPU cores, supplies for tools."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from libra import keys
from libra.config import RunConfig

if TYPE_CHECKING:
    from distributed import Client

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER, NODES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
CPU = "cpu"
"""Name of a machine without a GPU."""
GPU_FILES = ("/proc/driver/nvidia", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/accel*")
"""Driver files of NVIDIA, AMD, Windows' Linux, and other accelerators; every GPU needs one of
them."""
MEMORY_SLACK_FRAC = 0.15
"""Largest relative difference between a driver's memory and the datasheet's: error correction
and the driver take a part."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine: name and number of its GPUs, and the CPU cores that this process may use. The
    name is a datasheet's in Libra, else the driver's; `CPU` without GPUs."""

    gpu: str
    num_gpus: int
    cores: int

    def ranks(self, threads: int | None) -> int:
        """Number of GPUs; without a GPU, of ranks with ``threads`` cores each (by default all)."""
        return self.num_gpus or max(self.cores // (threads or self.cores), 1)


def may_have_gpu() -> bool:
    """Whether this machine has a GPU driver's file (Linux), without which torch finds no GPU."""
    return any(glob.glob(pattern) for pattern in GPU_FILES)  # noqa: PTH207  of absolute paths


def this_machine() -> Machine:
    """The machine of this process, as torch sees it."""
    cores = len(usable_cores())
    if sys.platform != "linux" or may_have_gpu():
        import torch  # more than a second

        if torch.cuda.is_available() and (number := torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(0)
            return Machine(gpu_name(properties.name, properties.total_memory), number, cores)
    return Machine(CPU, 0, cores)


def usable_cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def gpu_name(reported: str, memory_bytes: float) -> str:
    """Name of the datasheet of the GPU that the driver calls ``reported``, else ``reported``.

    A datasheet fits if the driver's name has all words of its name ("RTX-4090-24G" in "NVIDIA
    GeForce RTX 4090") and the memory is about equal.
    """
    from libra.hardware import known_gpus  # workers do without its tables

    words = set(re.findall(r"[a-z0-9]+", reported.lower()))
    for name, sheet in known_gpus().items():
        model = name.lower().split("-")[:-1]
        if words.issuperset(model) and abs(memory_bytes / sheet.memory_bytes - 1) <= MEMORY_SLACK_FRAC:
            return name
    return reported


def cluster_gpu(client: Client) -> str:
    """Name of the hardware of rollout and training workers; different names are joined."""
    from libra.cluster.connection import present_workers

    used = [
        address
        for address, worker in present_workers(client).items()
        if {keys.ROLLOUT, keys.TRAIN} & set(worker.get("resources", {}))
    ]
    return " and ".join(sorted({machine.gpu for machine in client.run(this_machine, workers=used).values()}))


class VisibleGpu(NamedTuple):
    """A visible GPU: ``entry`` of CUDA_VISIBLE_DEVICES; ``name``, its UUID or else ``gpu-N``."""

    entry: str
    name: str


def visible_gpus(visible: str | None, machine: Sequence[str], least: int = 1) -> tuple[VisibleGpu, ...]:
    """The GPUs that a process sees, in its order.

    ``visible``: its CUDA_VISIBLE_DEVICES, numbers or UUID prefixes; None means all. ``machine``:
    UUIDs of the machine's GPUs by number, empty if unknown. ``least``: number of GPUs if both are
    missing.
    """
    if visible is None:
        entries = [str(number) for number in range(len(machine) or least)]
    else:
        entries = [entry for entry in map(str.strip, visible.split(",")) if entry]
        entries = entries[: entries.index("-1")] if "-1" in entries else entries

    def name(entry: str) -> str:
        if entry.isdecimal():
            return machine[int(entry)] if int(entry) < len(machine) else f"gpu-{int(entry)}"
        meant = [uuid for uuid in machine if uuid.startswith(entry)]
        return meant[0] if len(meant) == 1 else entry

    return tuple(VisibleGpu(entry, name(entry)) for entry in entries)


def machine_gpus(driver: Path = DRIVER, nodes: Path = NODES) -> tuple[str, ...]:
    """UUIDs of the GPUs that this process may open, by PCI address; empty without a driver."""
    found = []
    for file in sorted(driver.glob("*/information")):
        facts = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        uuid, minor = facts.get("GPU UUID", "").strip(), facts.get("Device Minor", "").strip()
        if uuid and os.access(nodes / f"nvidia{minor}", os.R_OK | os.W_OK):
            found.append(uuid)
    return tuple(found)


def gpus_here(least: int = 1) -> tuple[VisibleGpu, ...]:
    """`visible_gpus` of this process."""
    return visible_gpus(os.environ.get(VARIABLE), machine_gpus(), least)


class ToolSupply(NamedTuple):
    """Supply of one tool worker: ids of its cores, memory in MiB, and number of GPUs for calls."""

    core_ids: tuple[int, ...]
    mib: int
    gpus: int


def tool_supply(config: RunConfig, index: int = 0) -> ToolSupply:
    """Supply of tool worker ``index``; local tool workers split the machine, at least a core
    each."""
    cluster = config.cluster
    local = cluster.scheduler is None
    share = (cluster.tool_workers_most or cluster.tool_workers) if local else 1
    usable = usable_cores()
    count = cluster.tool_supply.get("cores") or max(1, len(usable) // share)
    first = index * count if local else 0
    core_ids = tuple(usable[(first + i) % len(usable)] for i in range(min(count, len(usable))))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // share
    if "memory_gib" in cluster.tool_supply:
        memory_bytes = cluster.tool_supply["memory_gib"] * 2**30
    return ToolSupply(core_ids, memory_bytes >> 20, cluster.tool_supply.get("gpus", 0))


def tool_gpus(config: RunConfig, index: int, seen: Sequence[VisibleGpu]) -> tuple[VisibleGpu, ...]:
    """GPUs for calls of tools on tool worker ``index``, which sees ``seen``. Tool workers of a
    local cluster have different GPUs as long as there are enough."""
    count = min(config.cluster.tool_supply.get("gpus", 0), len(seen))
    first = index * count if config.cluster.scheduler is None else 0
    return tuple(seen[(first + i) % len(seen)] for i in range(count))
