"""Rows of bytes from the memory of one process into another, by name: offered without a copy, fetched
from several at once.

Source: EARL's data dispatcher (arXiv:2510.05943), which replaces gathering at the controller and
scattering again by direct transfers. Differs from the paper: rows have sizes of their own.

Invariants
----------
1. Offered memory does not change before `RowServer.withdraw`. A row that is withdrawn during a
   transfer is sent to the end.
2. The rows of a server arrive all of them, each with a right checksum, or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libra.errors import TransportError
from libra.transport.channel import Address, Channel, connect
from libra.transport.memory_reads import machine, recv_views, send_views
from libra.transport.server import Server

PURPOSE = "rows"
PARALLEL = 4
"""Servers used at once."""


class RowServer:
    """Offers rows to other processes of the run, which share ``secret`` and connect to ``address``. Port 0
    is any free one."""

    def __init__(self, secret: str, host: str, port: int = 0) -> None:
        self._rows: dict[str, memoryview] = {}
        self._lock = threading.Lock()
        self._server = Server(self._serve, secret=secret, purpose=PURPOSE, host=host, port=port)
        self.address = self._server.address

    def offer(self, rows: Mapping[str, Any]) -> None:
        """Offer rows, each a contiguous buffer; one of the same name is replaced."""
        views = {name: memoryview(buffer).cast("B") for name, buffer in rows.items()}
        with self._lock:
            self._rows |= views

    def withdraw(self, names: Iterable[str]) -> None:
        """Stop offering rows, if they are offered."""
        with self._lock:
            for name in names:
                self._rows.pop(name, None)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._rows

    def close(self) -> None:
        """Stop listening, and end all transfers."""
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

    ``neighbours``: whether to read the memory of servers on this machine if the kernel allows it.
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
