"""Bytes for another process: read from this one's memory where both are on one machine, else sent over
the connection.

Linux's ``process_vm_readv``, as MPI libraries use it between ranks of a node. The kernel decides
which processes may read (the same user, restricted further by containers and Yama).

Invariants
----------
1. Nothing is read before a probe: random bytes of the server, read at the address that it named,
   equal those that it sent. A process id of another machine or namespace does not pass.
2. All bytes arrive or OSError is raised.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra.transport.channel import Channel

RUNS_A_CALL = 512
_PROBE_BYTES = 32

Run = tuple[int, int]
"""Address and length of a run of bytes in some process."""


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call() -> Any:
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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def send_views(channel: Channel, views: Sequence[memoryview], request: Mapping[str, Any], **fields: Any) -> None:
    """Answer ``request`` with ``fields`` and the bytes of ``views``, for `recv_views`.

    A client whose request names this machine reads them in this process's memory, if it can.
    """
    views = [view for view in views if len(view)]
    num_bytes = sum(map(len, views))
    if request.get("machine") == machine():
        channel.send_frame(num_bytes=num_bytes, memory=_offered(views), **fields)
        answer = channel.recv_frame()  # until it comes, ``views`` keep the memory
        if answer is None or answer["read"]:
            return
    else:
        channel.send_frame(num_bytes=num_bytes, **fields)
    channel.send_bytes(views, checked=True)


def recv_views(channel: Channel, answer: Mapping[str, Any], views: Sequence[memoryview]) -> None:
    """Fill ``views`` with the bytes that `send_views` announced in ``answer``; OSError if they do not
    come."""
    views = [view for view in views if len(view)]
    if "memory" in answer:
        if is_readable := can_read(answer["memory"]):
            _read_all(answer["memory"]["pid"], answer["memory"]["runs"], views)
        channel.send_frame(read=is_readable)
        if is_readable:
            return
    channel.recv_bytes(views, checked=True)


def can_read(offer: dict[str, Any]) -> bool:
    """Whether this process can read the memory of the one that made ``offer``."""
    if _READ is None:
        return False
    address, expected = offer["probe"]
    found = np.zeros(_PROBE_BYTES, np.uint8)
    try:
        _read_all(int(offer["pid"]), [(int(address), _PROBE_BYTES)], [found.data])
    except OSError:
        return False
    return found.tobytes().hex() == str(expected)


def _offered(views: Sequence[memoryview]) -> dict[str, Any]:
    probe = [_PROBE.ctypes.data, _PROBE.tobytes().hex()]
    return {"pid": os.getpid(), "probe": probe, "runs": list(map(_run_of, views))}


def _run_of(view: memoryview) -> Run:
    return np.frombuffer(view, np.uint8).ctypes.data, len(view)


def _read_all(pid: int, runs: Sequence[Run], views: Sequence[memoryview]) -> None:
    """Fill ``views`` from the runs of another process; the kernel pairs them, however they are divided."""
    theirs, ours = [(address, length) for address, length in runs], list(map(_run_of, views))
    while ours:
        lists = [(_IOVec * len(part))(*part) for part in (ours[:RUNS_A_CALL], theirs[:RUNS_A_CALL])]
        got = _READ(pid, lists[0], len(lists[0]), lists[1], len(lists[1]), 0)
        if got <= 0:
            code = ctypes.get_errno() if got < 0 else 0
            why = (
                os.strerror(code)
                if code
                else f"{sum(length for _, length in ours)} bytes more are wanted than are there"
            )
            raise OSError(code, f"reading the memory of process {pid}: {why}")
        theirs, ours = _after(theirs, got), _after(ours, got)


def _after(runs: list[Run], num_bytes: int) -> list[Run]:
    for index, (address, length) in enumerate(runs):
        if num_bytes < length:
            return [(address + num_bytes, length - num_bytes), *runs[index + 1 :]]
        num_bytes -= length
    return []
