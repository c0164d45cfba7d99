"""Hardware of this machine, or of the workers of a cluster: GPUs by number and kind, or CPU cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.cluster.fork_server import may_have_gpu
from libra.cluster.present_workers import present_workers
from libra.hardware import GPU, known_gpus

if TYPE_CHECKING:
    from distributed import Client

CPU = "cpu"
"""Name of a machine without a GPU."""
MEMORY_SLACK_FRAC = 0.15
"""Largest difference between the memory that a driver reports and the datasheet's: error correction and the driver take
a part."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine.

    Attributes
    ----------
    gpu : str
        Name of its GPUs: that of a datasheet of Libra's where there is one, else the driver's; `CPU` where there are none.
    num_gpus : int
        0 without a GPU.
    cores : int
        CPU cores that this process may use.
    """

    gpu: str
    num_gpus: int
    cores: int

    def ranks(self, threads: int | None) -> int:
        """GPUs; without one, ranks of ``threads`` cores each (None: of all)."""
        return self.num_gpus or max(self.cores // (threads or self.cores), 1)


def this_machine() -> Machine:
    """The machine that this process is on, as torch sees it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform == "linux" and not may_have_gpu():
        return Machine(CPU, 0, cores)
    import torch  # more than a second

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        return Machine(CPU, 0, cores)
    properties = torch.cuda.get_device_properties(0)
    return Machine(gpu_name(properties.name, properties.total_memory), number, cores)


def gpu_name(reported: str, memory_bytes: float, sheets: Mapping[str, GPU] | None = None) -> str:
    """Name of the datasheet of the GPU that the driver calls ``reported``; ``reported`` where no datasheet fits.

    A datasheet fits where all words of its name are in the driver's ("RTX-4090-24G" in "NVIDIA GeForce RTX 4090") and the memory
    is about the datasheet's.
    """
    words = set(re.findall(r"[a-z0-9]+", reported.lower()))
    for name, sheet in (known_gpus() if sheets is None else sheets).items():
        model = name.lower().split("-")[:-1]
        if words.issuperset(model) and abs(memory_bytes / sheet.memory_bytes - 1) <= MEMORY_SLACK_FRAC:
            return name
    return reported


def cluster_gpu(client: Client) -> str:
    """Name of the hardware of a cluster's rollout and training workers; several names, joined, where they differ."""
    workers: Mapping[str, Mapping[str, Any]] = present_workers(client)
    used = [
        address for address, worker in workers.items() if {keys.ROLLOUT, keys.TRAIN} & set(worker.get("resources", {}))
    ]
    return " and ".join(sorted({machine.gpu for machine in client.run(this_machine, workers=used).values()}))
