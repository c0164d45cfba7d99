"""Memory of a training process: the peak of a step, and the return of freed memory to the system.

On a GPU the peak is torch's own (``max_memory_allocated``). On a CPU it is the process's resident memory (Linux:
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
"""Tensors of at least this size are mapped separately in a process that trains a large model on a CPU."""
LARGE_MODEL_BYTES = 2**26
"""Bytes of weights from which on a model is large: for a smaller one, fresh pages would cost a tenth of each step and save
almost nothing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@cache
def map_large_tensors() -> bool:
    """Make glibc map large tensors separately, so that freeing one returns its memory; False with another C library.

    By default glibc keeps tensors of up to 32 MB in one heap, which their different lifetimes fragment: a step of 1.6 GB
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
    """Make glibc return the memory of freed small tensors; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:  # another C library has none
        trim(0)


def resident_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process, now or (``VmHWM``) at its peak; 0 if the system does not report it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class StepMemory:
    """Peak memory of this process in a step, above the memory at the creation of this object.

    ``device`` is that of the model, which is loaded later.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        _trim()  # free memory in the heap does not count
        self.before_bytes = 0 if self.device.type == "cuda" else resident_bytes()
        self._watching = self._maps = False

    def model_loaded(self, num_bytes: int) -> None:
        """The weights were loaded; with a large model on a CPU, freed memory goes back to the system from now on."""
        if self.device.type == "cpu" and num_bytes >= LARGE_MODEL_BYTES:
            self._maps = map_large_tensors()

    def start(self) -> None:
        """A step begins: the peak is set back."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._watching = True
            return
        if self._maps:
            _trim()
        try:
            _CLEAR.write_text("5")
            self._watching = True
        except OSError:  # not Linux, or not allowed
            self._watching = False

    def peak_bytes(self) -> int:
        """The peak since `start`; 0 if the system does not report it."""
        if not self._watching:
            return 0
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(resident_bytes("VmHWM") - self.before_bytes, 0)
