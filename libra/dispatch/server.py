"""Blocks of batches in a worker's memory, served to the other workers of its run without a copy.

Invariants
----------
1. Memory that is offered does not change before `withdraw`.
2. Only whole runs inside a block are served; for anything else the client gets an error and no bytes.
3. A block that is withdrawn during a transfer is sent to the end: its memory stays until nothing reads it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra.dispatch.batch_layout import Block, Row
from libra.dispatch.process_memory_copy import machine, offered
from libra.errors import LayoutError
from libra.transport import Channel, Server

PURPOSE = "dispatch"
Buffer = Any
"""Anything whose memory can be read in place: bytes, a numpy array, a memoryview."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of a block: runs one after the other, and where each begins."""

    views: tuple[memoryview, ...]
    begins: tuple[int, ...]
    num_bytes: int

    def cut(self, offset: int, num_bytes: int) -> list[memoryview]:
        """``num_bytes`` from ``offset`` on, where they lie."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise LayoutError(f"got bytes {offset} to {offset + num_bytes} of a block of {self.num_bytes}")
        found, index = [], bisect_right(self.begins, offset) - 1
        while num_bytes:
            at = offset - self.begins[index]
            part = self.views[index][at : at + num_bytes]
            if len(part):
                found.append(part)
            offset, num_bytes, index = offset + len(part), num_bytes - len(part), index + 1
        return found


class DispatchServer:
    """Offers blocks of batches to other workers.

    Parameters
    ----------
    worker : str
        Name of this worker in layouts.
    secret : str
        The secret that all workers of the run share.
    host, port
        Where to listen; port 0 is any free one.

    Attributes
    ----------
    address : (str, int)
        Where clients connect.
    """

    def __init__(self, worker: str, secret: str, host: str, port: int = 0) -> None:
        self.worker = worker
        self._blocks: dict[str, _Memory] = {}
        self._lock = threading.Lock()
        self._server = Server(self._serve, secret=secret, purpose=PURPOSE, host=host, port=port)
        self.address = self._server.address

    def offer(self, name: str, rows: Sequence[Row], memory: Sequence[Buffer]) -> Block:
        """Offer a block of rows, each in memory of its own; returns the block as the controller sees it."""
        views = [memoryview(buffer).cast("B") for buffer in memory]
        block = Block(self.worker, name, tuple(rows), tuple(map(len, views)))
        self._add(name, views)
        return block

    def offer_array(self, name: str, rows: Sequence[Row], array: Buffer) -> Block:
        """Offer a C-contiguous array with one row of the batch for each of its first axis."""
        whole = memoryview(array)
        if not whole.c_contiguous or not whole.shape or whole.shape[0] != len(rows):
            raise LayoutError(
                f"block {name}: got an array of shape {whole.shape} for {len(rows)} rows; allowed is a C-contiguous one whose "
                "first axis is the rows"
            )
        num_bytes = whole.nbytes // len(rows) if len(rows) else 0
        block = Block(self.worker, name, rows, (num_bytes,) * len(rows))
        self._add(name, [whole.cast("B")] if whole.nbytes else [])
        return block

    def withdraw(self, name: str) -> None:
        """Stop offering a block, if it is offered."""
        with self._lock:
            self._blocks.pop(name, None)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._blocks

    def cut(self, name: str, offset: int, num_bytes: int) -> list[memoryview]:
        """A run of bytes of a block, where they lie; LayoutError if it is not offered or is shorter."""
        with self._lock:
            memory = self._blocks.get(name)
        if memory is None:
            raise LayoutError(f"{self.worker} holds no block {name!r}: it was withdrawn, or never offered here")
        return memory.cut(offset, num_bytes)

    def close(self) -> None:
        """Stop listening, and end all transfers."""
        self._server.close()

    def _add(self, name: str, views: Sequence[memoryview]) -> None:
        begins, at = [], 0
        for view in views:
            begins.append(at)
            at += len(view)
        with self._lock:
            if name in self._blocks:
                raise LayoutError(
                    f"{self.worker} holds a block {name!r} already; withdraw it, or give this one another name"
                )
            self._blocks[name] = _Memory(tuple(views), tuple(begins), at)

    def _serve(self, channel: Channel, client: str) -> None:
        """Answer one connection's requests, one after the other."""
        while (request := channel.recv_frame()) is not None:
            try:
                pieces = [(str(name), int(offset), int(num_bytes)) for name, offset, num_bytes in request["pieces"]]
                views = [view for piece in pieces for view in self.cut(*piece)]
            except LayoutError as error:
                channel.send_frame(error=str(error))
                continue
            send_views(channel, views, request)


def send_views(channel: Channel, views: Sequence[memoryview], request: Mapping[str, Any], **fields: Any) -> None:
    """Answer ``request`` with ``fields`` and the bytes of ``views``, for `libra.dispatch.client.recv_views`.

    A client on the machine that it names reads them in this process's memory, if it can.
    """
    num_bytes = sum(map(len, views))
    if request.get("machine") == machine():
        channel.send_frame(num_bytes=num_bytes, memory=offered(views), **fields)
        answer = channel.recv_frame()  # until it comes, ``views`` keep the memory
        if answer is None or answer["read"]:
            return
    else:
        channel.send_frame(num_bytes=num_bytes, **fields)
    channel.send_bytes(views, checked=True)
