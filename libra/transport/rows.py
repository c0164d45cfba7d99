"""Copies named rows of bytes between processes: offered without a copy, fetched from many servers.

Memory on the same machine is read directly (Linux's ``process_vm_readv``, as MPI does within a
node); otherwise rows cross the connection. Source: EARL's data dispatcher (arXiv:2510.05943), which
replaces gather and scatter at the controller by direct transfers. Differs from the paper: row sizes
vary.

Invariants
----------
1. Offered memory does not change before `RowServer.withdraw`. A row that is withdrawn during a
   transfer is still sent whole.
2. A server's rows arrive all together, each with a correct checksum, or not at all.
3. Memory is read only after a probe: the server's random bytes, read at the address that the server
   named, must equal those it sent. A process id of another machine or namespace fails the probe.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libra.errors import TransportError
from libra.transport.channel import Address, Channel, Server, connect

PURPOSE = "rows"
PARALLEL = 4
"""Servers used at once."""
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
    """Name shared by processes that may read each other's memory; "" if this process never can."""
    if _READ is None:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def send_views(channel: Channel, views: Sequence[memoryview], request: Mapping[str, Any], **fields: Any) -> None:
    """Answer ``request`` with ``fields`` and the bytes of ``views``, for `recv_views`.

    A client on this machine reads the bytes from this process's memory, if it can.
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
    """Fill ``views`` with the bytes that `send_views` announced. Raises OSError if incomplete."""
    views = [view for view in views if len(view)]
    if "memory" in answer:
        if is_readable := can_read(answer["memory"]):
            _read_all(answer["memory"]["pid"], answer["memory"]["runs"], views)
        channel.send_frame(read=is_readable)
        if is_readable:
            return
    channel.recv_bytes(views, checked=True)


def can_read(offer: dict[str, Any]) -> bool:
    """Whether this process can read the memory of the process that made ``offer``."""
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
    """Fill ``views`` from another process's memory ranges, which may be divided differently."""
    theirs, ours = [(address, length) for address, length in runs], list(map(_run_of, views))
    while ours:
        lists = [
            (_IOVec * len(part))(*(_IOVec(*run) for run in part)) for part in (ours[:RUNS_A_CALL], theirs[:RUNS_A_CALL])
        ]
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


class RowServer:
    """Offers rows at ``address`` to processes that share ``secret``; port 0 picks a free port."""

    def __init__(self, secret: str, host: str, port: int = 0) -> None:
        self._rows: dict[str, memoryview] = {}
        self._lock = threading.Lock()
        self._server = Server(self._serve, secret=secret, purpose=PURPOSE, host=host, port=port)
        self.address = self._server.address

    def offer(self, rows: Mapping[str, Any]) -> None:
        """Offer rows, each a contiguous buffer; an offered row of the same name is replaced."""
        views = {name: memoryview(buffer).cast("B") for name, buffer in rows.items()}
        with self._lock:
            self._rows |= views

    def withdraw(self, names: Iterable[str]) -> None:
        """Stop offering these rows; unknown names are ignored."""
        with self._lock:
            for name in names:
                self._rows.pop(name, None)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._rows

    def close(self) -> None:
        self._server.close()

    def _serve(self, channel: Channel, client: str) -> None:
        while (request := channel.recv_frame()) is not None:
            names = [str(name) for name in request["rows"]]
            with self._lock:
                views = [self._rows[name] for name in names if name in self._rows]
            if len(views) < len(names):
                channel.send_frame(error=f"{len(names) - len(views)} of {len(names)} rows are not offered here")
            else:
                send_views(channel, views, request, sizes=list(map(len, views)))


@dataclass(slots=True)
class FetchedRows:
    """The rows that arrived, and the error of each server that failed."""

    rows: dict[str, memoryview] = field(default_factory=dict)
    num_bytes: int = 0
    failed: dict[Address, str] = field(default_factory=dict)


def fetch_rows(wanted: Mapping[Address, Sequence[str]], secret: str, *, neighbours: bool = True) -> FetchedRows:
    """Fetch rows by name from the servers that offer them.

    ``neighbours``: whether to read memory of servers on this machine, if the kernel permits.
    """
    fetched = FetchedRows()

    def receive(address: Address) -> dict[str, memoryview] | str:
        try:
            return _receive(address, wanted[address], secret, neighbours)
        except (OSError, ValueError, LookupError, TypeError) as error:  # and malformed answers
            return str(error)

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="libra-fetch") as threads:
        for address, found in zip(wanted, threads.map(receive, wanted), strict=True):
            if isinstance(found, str):
                fetched.failed[address] = found
            else:
                fetched.rows |= found
                fetched.num_bytes += sum(map(len, found.values()))
    return fetched


def _receive(address: Address, names: Sequence[str], secret: str, neighbours: bool) -> dict[str, memoryview]:
    with contextlib.closing(connect(address, secret, purpose=PURPOSE)) as channel:
        channel.send_frame(rows=list(names), machine=(machine() or None) if neighbours else None)
        answer = channel.recv_frame() or {"error": "the server closed the connection"}
        if "error" in answer:
            raise TransportError(str(answer["error"]))
        ends = np.cumsum([0, *map(int, answer["sizes"])]).tolist()
        if len(ends) != len(names) + 1 or ends[-1] != answer["num_bytes"]:
            raise TransportError(f"{len(ends) - 1} rows of {answer['num_bytes']} bytes came for {len(names)}")
        data = np.empty(ends[-1], np.uint8).data
        views = [data[begin:end] for begin, end in itertools.pairwise(ends)]
        recv_views(channel, answer, views)
        return dict(zip(names, views, strict=True))
