"""Names of GPUs that all processes of a machine agree on, whatever each of them sees (CUDA_VISIBLE_DEVICES)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
NODES = Path("/dev")


class VisibleGpu(NamedTuple):
    """A GPU that a process sees. ``entry``: as CUDA_VISIBLE_DEVICES has it; ``name``: its UUID, else ``gpu-N``."""

    entry: str
    name: str


def visible_gpus(visible: str | None, machine: Sequence[str], least: int = 1) -> tuple[VisibleGpu, ...]:
    """The GPUs that a process sees, in its order.

    Parameters
    ----------
    visible : str or None
        Its CUDA_VISIBLE_DEVICES: numbers or UUIDs, which may be cut short. None: it is not set, and all are seen.
    machine : sequence of str
        UUIDs of the GPUs of the machine, by number; empty: not known.
    least : int
        GPUs that are there at least, where neither of the two says how many.
    """
    if visible is None:
        entries = [str(number) for number in range(len(machine) or least)]
    else:
        entries = [entry for entry in map(str.strip, visible.split(",")) if entry]
        entries = entries[: entries.index("-1")] if "-1" in entries else entries
    return tuple(VisibleGpu(entry, _name(entry, machine)) for entry in entries)


def _name(entry: str, machine: Sequence[str]) -> str:
    if entry.isdecimal():
        return machine[int(entry)] if int(entry) < len(machine) else f"gpu-{int(entry)}"
    meant = [uuid for uuid in machine if uuid.startswith(entry)]
    return meant[0] if len(meant) == 1 else entry


def machine_gpus(driver: Path = DRIVER, nodes: Path = NODES) -> tuple[str, ...]:
    """UUIDs of the GPUs that this process may open, by number (that of their PCI addresses); empty where no driver says."""
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
