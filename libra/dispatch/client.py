"""Fetching what one worker wants of a batch, from all of its holders at once and into one buffer.

Invariants
----------
1. The buffer is returned when every row is in its place and every move's checksum was right, or not at all.
2. A holder that fails, in the middle of a move too, is not asked again: its moves are planned anew among the others that hold
   those rows. DispatchError, which names what each one said, comes when a row has no holder left.
3. What this worker holds itself is copied in memory and never sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.dispatch.batch_layout import Block, Move, Row, Wanted, again, plan
from libra.dispatch.line import connect
from libra.dispatch.process_memory_copy import can_read, machine, read
from libra.dispatch.server import DispatchServer
from libra.errors import DispatchError, LayoutError

logger = logging.getLogger(__name__)

PARALLEL = 4
"""Holders that are asked at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """All that a consumer is told: metadata only, as the controller sends it.

    Attributes
    ----------
    rows : tuple of Row
        What it wants, in the order in which it shall lie in the buffer.
    moves : tuple of Move
        Its part of the plan.
    blocks : tuple of Block
        Who holds what, for when a holder fails.
    addresses : mapping
        Host and port of each holder's `DispatchServer`.
    """

    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    blocks: tuple[Block, ...]
    addresses: Mapping[str, tuple[str, int]]


@dataclass(slots=True)
class Fetched:
    """What arrived: the bytes of all rows, one after the other, and how they came."""

    data: NDArray[np.uint8]
    received_bytes: int = 0
    local_bytes: int = 0
    said: dict[str, str] = field(default_factory=dict)
    """What holders that failed were told of."""


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
        Holders asked at once.
    neighbours : bool
        Read the memory of holders on this machine, where it lets us. False: everything over connections.

    Raises
    ------
    DispatchError
        A row has no holder left.
    """
    sizes = {row: size for block in order.blocks for row, size in zip(block.rows, block.num_bytes, strict=True)}
    fetched = Fetched(np.empty(sum(sizes[row] for row in order.rows), np.uint8))
    moves, lost = order.moves, fetched.said
    with ThreadPoolExecutor(max(1, parallel), thread_name_prefix="libra-fetch") as threads:
        while moves:
            answers = list(
                threads.map(lambda move: _tried(move, me, order, fetched.data, secret, own, neighbours), moves)
            )
            failed = []
            for move, fault in zip(moves, answers, strict=True):
                if fault is not None:
                    lost[move.source] = fault
                    failed.append(move)
                elif move.source == me:
                    fetched.local_bytes += move.num_bytes
                else:
                    fetched.received_bytes += move.num_bytes
            if not failed:
                break
            try:
                moves = again(order.blocks, me, order.rows, failed, lost)
            except LayoutError as gone:
                said = "; ".join(f"{name}: {text}" for name, text in lost.items())
                raise DispatchError(f"dispatch: {gone}. What they said: {said}") from gone
            logger.warning("dispatch: %s gave nothing, others are asked: %s", ", ".join(lost), "; ".join(lost.values()))
    return fetched


def _tried(
    move: Move,
    me: str,
    order: Order,
    data: NDArray[np.uint8],
    secret: str,
    own: DispatchServer | None,
    neighbours: bool,
) -> str | None:
    """Take one move; what went wrong, None where nothing did."""
    target = data.data
    try:
        if move.source == me:
            if own is None:
                raise DispatchError(f"dispatch: {me} is said to hold rows, but offers none")
            _copy(move, own, target)
        else:
            _ask(move, order.addresses, target, secret, neighbours)
    except (OSError, ValueError, KeyError) as fault:  # DispatchError and LayoutError are among them
        return str(fault) if not isinstance(fault, KeyError) else f"no address of {fault} is known"
    return None


def _ask(
    move: Move, addresses: Mapping[str, tuple[str, int]], target: memoryview, secret: str, neighbours: bool
) -> None:
    host, port = addresses[move.source]
    line = connect((host, port), secret)
    try:
        pieces = [[piece.block, piece.offset_bytes, piece.num_bytes] for piece in move.pieces]
        line.say(pieces=pieces, machine=machine() if neighbours and machine() else None)
        answer = line.hear() or {"error": "it said nothing"}
        if "error" in answer:
            raise DispatchError(str(answer["error"]))
        if answer["num_bytes"] != move.num_bytes:
            raise DispatchError(
                f"dispatch: {answer['num_bytes']} bytes are offered where {move.num_bytes} were asked for"
            )
        views = [target[piece.at_bytes : piece.at_bytes + piece.num_bytes] for piece in move.pieces]
        if "memory" in answer:
            if can_read(answer["memory"]):
                read(answer["memory"]["pid"], answer["memory"]["runs"], views)
                return line.say(read=True)
            line.say(read=False)
        crc = line.receive(views)
        end = line.hear() or {}
        if end.get("crc32") != crc:
            raise DispatchError(f"dispatch: bytes with crc32 {crc} arrived, sent were {end.get('crc32')}")
    finally:
        line.close()


def _copy(move: Move, own: DispatchServer, target: memoryview) -> None:
    for piece in move.pieces:
        at = piece.at_bytes
        for view in own.cut(piece.block, piece.offset_bytes, piece.num_bytes):
            target[at : at + len(view)] = view
            at += len(view)


def rows_of(fetched: Fetched, order: Order) -> Mapping[Row, memoryview]:
    """Each row where it lies in the buffer, in the order wanted."""
    sizes = {row: size for block in order.blocks for row, size in zip(block.rows, block.num_bytes, strict=True)}
    views, at = {}, 0
    whole = fetched.data.data
    for row in order.rows:
        views[row] = whole[at : at + sizes[row]]
        at += sizes[row]
    return views


def orders(blocks: Sequence[Block], wanted: Wanted, addresses: Mapping[str, tuple[str, int]]) -> dict[str, Order]:
    """What the controller sends each consumer, from one plan for all of them."""
    whole = plan(blocks, wanted)
    return {name: Order(tuple(rows), whole.to(name), tuple(blocks), dict(addresses)) for name, rows in wanted.items()}
