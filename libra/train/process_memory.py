"""Memory of a training process: the most that a step held, and how what it freed goes back to the system.

On a GPU the most is torch's own count of it (``max_memory_allocated``). On a CPU it is the process's resident memory (Linux:
``VmHWM``, set back before the step) less what was resident before the model was loaded.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

MAPPED_FROM_BYTES = 2**18
"""Tensors of this size and more are mapped on their own in a process that trains a large model on a CPU."""
LARGE_MODEL_BYTES = 2**26
"""Bytes of weights from which on a model is large: below, fresh pages would cost a tenth of each step and save next to nothing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@cache
def map_large_tensors() -> bool:
    """Have glibc map large tensors on their own, so that their memory is the system's again when they are freed; False elsewhere.

    Left alone glibc keeps tensors of up to 32 MB in one heap, which their different lifetimes fill with holes: a step of 1.6 GB
    of tensors was resident with 2.4 GB, and 2.3 GB of that stayed after it. The price is the system's time for fresh pages.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    done = mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, MAPPED_FROM_BYTES)
    logger.debug("tensors of %d bytes and more are mapped on their own: %s", MAPPED_FROM_BYTES, bool(done))
    return bool(done)


def _trim() -> None:
    """Have glibc give back what it holds of freed small tensors, milliseconds before a step of seconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:  # another C library has none
        trim(0)


def resident_bytes(name: str = "VmRSS") -> int:
    """What of this process is in memory now, or (``VmHWM``) was at most; 0 where the system does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class StepMemory:
    """The most memory that this process holds in a step, above what it held when this object was made.

    Parameters
    ----------
    device : torch.device or str
        Where the model will be.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        _trim()  # what lies free in the heap is nobody's
        self.before_bytes = 0 if self.device.type == "cuda" else resident_bytes()
        self._watching = self._maps = False

    def model_loaded(self, num_bytes: int) -> None:
        """The weights are in memory and have so many bytes: with a large model on a CPU, what is freed goes back to the system."""
        if self.device.type == "cpu" and num_bytes >= LARGE_MODEL_BYTES:
            self._maps = map_large_tensors()

    def start(self) -> None:
        """A step begins: what was most before it does not count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._watching = True
            return
        if self._maps:
            _trim()
        try:
            _CLEAR.write_text("5")
            self._watching = True
        except OSError:  # not Linux, or not allowed: nothing is known
            self._watching = False

    def peak_bytes(self) -> int:
        """The most since `start`; 0 where the system does not say."""
        if not self._watching:
            return 0
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(resident_bytes("VmHWM") - self.before_bytes, 0)
