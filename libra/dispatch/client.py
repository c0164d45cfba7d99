"""Fetching the rows of a batch that one worker needs, from all servers at once and into one buffer.

Invariants
----------
1. The buffer is returned when every row is in its place and every move's checksum was right, or not at all.
2. A server that fails, also during a move, is not used again: its moves are planned again among the others that hold
   those rows. When a row has no server left, DispatchError has the error of each.
3. What this worker holds itself is copied in memory and never sent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.dispatch.batch_layout import Block, Move, Row, Wanted, plan, replan
from libra.dispatch.process_memory_copy import can_read, machine, read
from libra.dispatch.server import PURPOSE, DispatchServer
from libra.errors import DispatchError, LayoutError
from libra.transport import Address, Channel, connect

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
    """Fill ``views`` with the bytes that `libra.dispatch.server.send_views` announced in ``answer``; OSError if they do not
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
