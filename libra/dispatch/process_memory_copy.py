"""Memory of another process of this machine, read in one copy.

Linux's ``process_vm_readv``, as MPI libraries use it between ranks of a node. The kernel decides which processes may (the same
user, restricted further by containers and Yama); a probe finds out, and where it fails the bytes go over the connection.

Invariants
----------
1. Nothing is read before the probe: random bytes of the server, read at the address that it named, are those that it sent. A
   process id that is another process here (another machine, another namespace) does not pass.
2. All bytes are read or OSError is raised.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RUNS_A_CALL = 512
BYTES_A_CALL = 64 * 2**20
_PROBE_BYTES = 32

Run = tuple[int, int]
"""Address and length of a run of bytes in some process."""


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        pointer, unsigned = ctypes.POINTER(_IOVec), ctypes.c_ulong
        call.argtypes = (ctypes.c_int, pointer, unsigned, pointer, unsigned, unsigned)
        call.restype = ctypes.c_ssize_t
    return call


_READ = _system_call()
_PROBE = np.frombuffer(secrets.token_bytes(_PROBE_BYTES), np.uint8)


@functools.cache
def machine() -> str:
    """Equal in processes that may be able to read each other's memory; empty if this one never can."""
    if _READ is None:
        return ""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').stat().st_ino}"
        )
    except OSError:
        return ""


def run_of(view: memoryview) -> Run:
    """Address and length of a view in this process."""
    return np.frombuffer(view, np.uint8).ctypes.data, len(view)


def offered(views: Sequence[memoryview]) -> dict[str, Any]:
    """What another process needs to read ``views``; JSON-able. The memory has to stay until it has done so."""
    return {
        "pid": os.getpid(),
        "probe": [_PROBE.ctypes.data, _PROBE.tobytes().hex()],
        "runs": [run_of(view) for view in views],
    }


def can_read(offer: dict[str, Any]) -> bool:
    """Whether this process can read the memory of the one that made ``offer``."""
    if _READ is None:
        return False
    address, expected = offer["probe"]
    found = np.zeros(_PROBE_BYTES, np.uint8)
    try:
        read(int(offer["pid"]), [(int(address), _PROBE_BYTES)], [found.data])
    except OSError:
        return False
    return found.tobytes().hex() == str(expected)


def read(pid: int, runs: Sequence[Run], views: Sequence[memoryview]) -> None:
    """Fill ``views`` with the bytes of ``runs``, which are as many, of process ``pid``; OSError if it cannot."""
    batch: list[tuple[int, int, int]] = []
    size = 0
    for pair in _paired(runs, [run_of(view) for view in views]):
        batch.append(pair)
        size += pair[2]
        if len(batch) == RUNS_A_CALL or size >= BYTES_A_CALL:
            _read(pid, batch, size)
            batch, size = [], 0
    if batch:
        _read(pid, batch, size)


def _read(pid: int, batch: Sequence[tuple[int, int, int]], size: int) -> None:
    vector = _IOVec * len(batch)
    theirs = vector(*(_IOVec(source, length) for source, _, length in batch))
    ours = vector(*(_IOVec(target, length) for _, target, length in batch))
    got = _READ(pid, ours, len(batch), theirs, len(batch), 0)
    if got != size:
        code = ctypes.get_errno() if got < 0 else 0
        raise OSError(
            code, f"reading {size} bytes of process {pid}: {os.strerror(code) if code else f'{got} were there'}"
        )


def _paired(runs: Sequence[Run], targets: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of the longest common runs of both sides, in order."""
    sources = iter(runs)
    source = left = 0
    for address, length in targets:
        target = address
        while length:
            if not left:
                source, left = next(sources, (0, 0))
                if not left:
                    raise OSError(f"{length} bytes more are wanted than are offered")
            part = min(left, length, BYTES_A_CALL)
            yield source, target, part
            source, target, left, length = source + part, target + part, left - part, length - part
