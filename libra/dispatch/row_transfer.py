"""Rows of batches from the memory of one worker into the buffer of another, offered without a copy and fetched from all at once.

Invariants
1. Memory that is offered does not change before `DispatchServer.withdraw`. A block that is withdrawn during a transfer is sent to
   the end. Only whole runs inside a block are served; for anything else the client gets an error and no bytes.
2. A buffer is returned when every row is in its place and every move's checksum was right, or not at all.
3. A server that fails, also during a move, is not used again: its moves are planned again among the others that hold
   those rows. When a row has no server left, DispatchError has the error of each.
4. What a worker holds itself is copied in memory and never sent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.dispatch.batch_layout import Block, Move, Row, Wanted, plan, replan
from libra.dispatch.process_memory_copy import can_read, machine, offered, read
from libra.errors import DispatchError, LayoutError
from libra.transport import Address, Channel, Server, connect

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
    """Answer ``request`` with ``fields`` and the bytes of ``views``, for `recv_views`.

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


logger = logging.getLogger(__name__)

PARALLEL = 4
"""Servers used at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """All that a consumer gets from the controller: metadata only.

    Attributes
    ----------
    rows : tuple of Row
        The rows it needs, in the order of the buffer.
    moves : tuple of Move
        Its part of the plan.
    blocks : tuple of Block
        Which worker holds which rows; needed when a server fails.
    addresses : mapping
        Host and port of each worker's `DispatchServer`.
    """

    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    blocks: tuple[Block, ...]
    addresses: Mapping[str, Address]

    def sizes(self) -> dict[Row, int]:
        """Bytes of every row that has a server."""
        return {row: size for block in self.blocks for row, size in zip(block.rows, block.num_bytes, strict=True)}


@dataclass(slots=True)
class Fetched:
    """What arrived: the bytes of all rows, one after the other, and the bytes and errors by server."""

    data: NDArray[np.uint8]
    received_bytes: int = 0
    local_bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Error of each worker whose server failed."""


def fetch(
    order: Order,
    me: str,
    *,
    secret: str,
    own: DispatchServer | None = None,
    parallel: int = PARALLEL,
    neighbours: bool = True,
) -> Fetched:
    """Get every row of ``order`` to worker ``me``.

    Parameters
    ----------
    own : DispatchServer, optional
        This worker's own, where it holds rows of the batch itself.
    parallel : int
        Servers used at once.
    neighbours : bool
        Read the memory of workers on this machine, where the kernel allows it. False: everything over connections.

    Raises
    ------
    DispatchError
        A row has no server left.
    """
    sizes = order.sizes()
    fetched = Fetched(np.empty(sum(sizes[row] for row in order.rows), np.uint8))
    target, failed, moves = fetched.data.data, fetched.failed, order.moves

    def carry_out(move: Move) -> str | None:
        return _carry_out(move, order, me, own, target, secret, neighbours)

    with ThreadPoolExecutor(max(1, parallel), thread_name_prefix="libra-fetch") as threads:
        while moves:
            lost = []
            for move, error in zip(moves, threads.map(carry_out, moves), strict=True):
                if error is not None:
                    failed[move.source] = error
                    lost.append(move)
                elif move.source == me:
                    fetched.local_bytes += move.num_bytes
                else:
                    fetched.received_bytes += move.num_bytes
            if not lost:
                break
            errors = "; ".join(f"{name}: {text}" for name, text in failed.items())
            try:
                moves = replan(order.blocks, me, order.rows, lost, failed)
            except LayoutError as gone:
                raise DispatchError(f"dispatch: {gone}. Errors: {errors}") from gone
            logger.warning("dispatch: servers failed, others are used: %s", errors)
    return fetched


def _carry_out(
    move: Move,
    order: Order,
    me: str,
    own: DispatchServer | None,
    target: memoryview,
    secret: str,
    neighbours: bool,
) -> str | None:
    """Fill the places of one move in ``target``; returns what went wrong, None if nothing did."""
    try:
        if move.source == me:
            _copy(move, own, target)
        else:
            _receive(move, order.addresses.get(move.source), target, secret, neighbours)
    except (OSError, ValueError, LookupError, TypeError) as error:  # all errors of ours, and answers that are malformed
        return str(error)
    return None


def _copy(move: Move, own: DispatchServer | None, target: memoryview) -> None:
    if own is None:
        raise DispatchError(f"dispatch: {move.source} holds rows in the plan, but offers none")
    for piece in move.pieces:
        at = piece.at_bytes
        for view in own.cut(piece.block, piece.offset_bytes, piece.num_bytes):
            target[at : at + len(view)] = view
            at += len(view)


def _receive(move: Move, address: Address | None, target: memoryview, secret: str, neighbours: bool) -> None:
    if address is None:
        raise DispatchError(f"dispatch: no address of {move.source} is known")
    with contextlib.closing(connect(address, secret, purpose=PURPOSE)) as channel:
        pieces = [[piece.block, piece.offset_bytes, piece.num_bytes] for piece in move.pieces]
        channel.send_frame(pieces=pieces, machine=machine() if neighbours and machine() else None)
        answer = channel.recv_frame() or {"error": "the server closed the connection"}
        if "error" in answer:
            raise DispatchError(str(answer["error"]))
        if (offered_bytes := answer.get("num_bytes")) != move.num_bytes:
            raise DispatchError(f"dispatch: {offered_bytes} bytes are offered, {move.num_bytes} were requested")
        views = [target[piece.at_bytes : piece.at_bytes + piece.num_bytes] for piece in move.pieces]
        recv_views(channel, answer, views)


def recv_views(channel: Channel, answer: Mapping[str, Any], views: Sequence[memoryview]) -> None:
    """Fill ``views`` with the bytes that `send_views` announced in ``answer``; OSError if they do not
    come."""
    if "memory" in answer:
        is_readable = can_read(answer["memory"])
        if is_readable:
            read(answer["memory"]["pid"], answer["memory"]["runs"], views)
        channel.send_frame(read=is_readable)
        if is_readable:
            return
    channel.recv_bytes(views, checked=True)


def rows_of(fetched: Fetched, order: Order) -> Mapping[Row, memoryview]:
    """A view of each row in the buffer, in the requested order."""
    views, at = {}, 0
    sizes, whole = order.sizes(), fetched.data.data
    for row in order.rows:
        views[row] = whole[at : at + sizes[row]]
        at += sizes[row]
    return views


def orders(blocks: Sequence[Block], wanted: Wanted, addresses: Mapping[str, Address]) -> dict[str, Order]:
    """What the controller sends each consumer, from one plan for all of them."""
    whole = plan(blocks, wanted)
    return {name: Order(tuple(rows), whole.to(name), tuple(blocks), dict(addresses)) for name, rows in wanted.items()}
