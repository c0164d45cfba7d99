"""The memory that the processes of a vLLM engine share, which outlives them where they are killed.

On a CPU they are killed at once: they have nothing to save, and ending by themselves takes them a second and more, during which a
change of roles would wait. vLLM's ring buffers and the memory of its ranks are files in ``/dev/shm`` with names.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_NAMES = ("psm_", "vllm_dist_")
_PROCESSES = Path("/proc")


def shared_memory(process_ids: Iterable[int]) -> set[Path]:
    """Files of shared memory that these processes and their descendants have mapped, and this process has not; on Linux only."""
    found, left = set[Path](), list(process_ids)
    while left:
        process = left.pop()
        found |= _mapped(str(process))
        for children in (_PROCESSES / str(process) / "task").glob("*/children"):
            with suppress(OSError):
                left += map(int, children.read_text().split())
    return found - _mapped("self")


def _mapped(process: str) -> set[Path]:
    try:
        lines = (_PROCESSES / process / "maps").read_text().splitlines()
    except OSError:  # it has ended, or there is no such directory
        return set()
    paths = (Path(line.split(maxsplit=5)[5]) for line in lines if str(_MEMORY) in line)
    return {path for path in paths if path.parent == _MEMORY and path.name.startswith(_NAMES)}
