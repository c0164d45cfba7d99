"""Which bytes of a batch go from which worker to which. Pure: its input is rows, sizes and names.

A batch is rows (sequences of any size) in *blocks*: rows that lie one after the other in one worker's memory. Each
consumer lists the rows that it needs, in order. `plan` returns *moves*, one for each pair of workers, made of *pieces*:
runs of bytes with their offsets at both ends.

Source: EARL's data dispatcher (arXiv:2510.05943), which replaces gathering at the controller and scattering again by direct
transfers along the layouts of producer and consumer. Differs from the paper: rows have sizes of their own, several workers
may hold a row, and a plan can be made again without workers that failed.

Invariants
----------
1. Every row that a consumer wants arrives there exactly once, at its place in that order; no other byte moves.
2. A consumer's own rows are a move from it to itself, which is not sent.
3. Of several workers that hold a row, the one with the fewest bytes to send so far sends it; rows that only one holds are
   counted first. The same blocks and orders give the same plan everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from libra.errors import LayoutError

Row = int | str
"""Name of a row, unique in its batch."""
Wanted = Mapping[str, Sequence[Row]]
"""The rows that each worker needs, in the order of its buffer."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows one after the other in the memory of ``worker``; ``num_bytes`` has the size of each.

    Pass rows that are numbered in order as a ``range``: it is sent as a range, not as a list.
    """

    worker: str
    name: str
    rows: Sequence[Row]
    num_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.num_bytes) or len(set(self.rows)) != len(self.rows):
            raise LayoutError(
                f"block {self.name} of {self.worker}: got {len(self.rows)} rows ({len(set(self.rows))} different) and "
                f"{len(self.num_bytes)} sizes; a block has different rows with a size each"
            )
        if any(size < 0 for size in self.num_bytes):
            raise LayoutError(f"block {self.name} of {self.worker}: got a size of {min(self.num_bytes)} bytes")

    def __reduce__(self) -> tuple[Any, ...]:
        """Sizes are sent as runs of equal ones: a tensor's rows are one run."""
        return _block, (
            self.worker,
            self.name,
            self.rows,
            [(size, len(list(run))) for size, run in groupby(self.num_bytes)],
        )


def _block(worker: str, name: str, rows: Sequence[Row], runs: Sequence[tuple[int, int]]) -> Block:
    return Block(worker, name, rows, tuple(size for size, count in runs for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of a block, and its place in the consumer's buffer."""

    block: str
    offset_bytes: int
    at_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """The pieces that one worker sends to another (or copies for itself), in the order of sending."""

    source: str
    destination: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Moves by destination, and the size of the buffer that each destination fills."""

    moves: tuple[Move, ...]
    buffer_bytes: Mapping[str, int]

    def to(self, destination: str) -> tuple[Move, ...]:
        """Moves of one consumer, beginning with the worker after it, so that consumers do not all begin with the same one."""
        return tuple(move for move in self.moves if move.destination == destination)


class _Place(NamedTuple):
    """A row in one worker's memory."""

    worker: str
    block: str
    offset_bytes: int


def plan(blocks: Sequence[Block], wanted: Wanted) -> DispatchPlan:
    """The moves that bring every wanted row to its consumer.

    Raises
    ------
    LayoutError
        No worker holds a wanted row, copies of a row differ in size, a consumer wants a row twice, or a worker has two blocks of
        one name.
    """
    places, sizes = _places(blocks)
    for consumer, rows in wanted.items():
        if len(set(rows)) != len(rows):
            raise LayoutError(f"{consumer} wants {len(rows)} rows, {len(set(rows))} different; each can be wanted once")
        if missing := [row for row in rows if row not in places]:
            raise LayoutError(
                f"{consumer} wants {len(missing)} rows that no worker holds, the first is {missing[0]!r}; "
                f"{len(places)} rows are held"
            )
    chosen = _choose(places, sizes, wanted)
    order = sorted({block.worker for block in blocks} | set(wanted))
    moves: list[Move] = []
    buffer_bytes = {}
    for consumer, rows in wanted.items():
        starts, end = _starts(rows, sizes)
        buffer_bytes[consumer] = end
        moves += _moves(consumer, {row: chosen[consumer, row] for row in rows}, starts, sizes, order)
    return DispatchPlan(tuple(moves), buffer_bytes)


def replan(
    blocks: Sequence[Block], consumer: str, rows: Sequence[Row], failed: Sequence[Move], lost: Collection[str]
) -> tuple[Move, ...]:
    """Moves in place of those that ``failed``, from workers other than ``lost``; ``consumer`` wants ``rows``.

    LayoutError if no other worker holds one of those rows.
    """
    _, sizes = _places(blocks)
    starts, _ = _starts(rows, sizes)
    gaps = sorted((piece.at_bytes, piece.at_bytes + piece.num_bytes) for move in failed for piece in move.pieces)
    begins = [begin for begin, _ in gaps]
    missing = []
    for row in rows:
        index = bisect_right(begins, starts[row]) - 1
        if sizes[row] and index >= 0 and starts[row] < gaps[index][1]:
            missing.append(row)
    left = [block for block in blocks if block.worker not in lost]
    places, _ = _places(left)
    if gone := [row for row in missing if row not in places]:
        raise LayoutError(
            f"{consumer}: only {', '.join(sorted(lost))} had {len(gone)} of its rows; the first is {gone[0]!r}"
        )
    chosen = _choose(places, sizes, {consumer: missing})
    order = sorted({block.worker for block in left} | {consumer})
    return tuple(_moves(consumer, {row: chosen[consumer, row] for row in missing}, starts, sizes, order))


def _places(blocks: Sequence[Block]) -> tuple[dict[Row, list[_Place]], dict[Row, int]]:
    places: dict[Row, list[_Place]] = {}
    sizes: dict[Row, int] = {}
    seen: set[tuple[str, str]] = set()
    for block in blocks:
        if (block.worker, block.name) in seen:
            raise LayoutError(f"{block.worker} has two blocks of the name {block.name}; give each its own name")
        seen.add((block.worker, block.name))
        offset = 0
        for row, size in zip(block.rows, block.num_bytes, strict=True):
            if sizes.setdefault(row, size) != size:
                raise LayoutError(
                    f"row {row!r} has {size} bytes on {block.worker} and {sizes[row]} on {places[row][0].worker}; "
                    "copies of a row are the same"
                )
            places.setdefault(row, []).append(_Place(block.worker, block.name, offset))
            offset += size
    return places, sizes


def _choose(
    places: Mapping[Row, Sequence[_Place]], sizes: Mapping[Row, int], wanted: Wanted
) -> dict[tuple[str, Row], _Place]:
    """The place from which each consumer gets each row."""
    chosen: dict[tuple[str, Row], _Place] = {}
    load: dict[str, int] = {}
    shared: list[tuple[str, Row]] = []
    for consumer, rows in wanted.items():
        for row in rows:
            own = next((place for place in places[row] if place.worker == consumer), None)
            if own is not None:
                chosen[consumer, row] = own
            elif len(places[row]) == 1:
                only = chosen[consumer, row] = places[row][0]
                load[only.worker] = load.get(only.worker, 0) + sizes[row]
            else:
                shared.append((consumer, row))
    for consumer, row in sorted(shared, key=lambda pair: -sizes[pair[1]]):
        least = chosen[consumer, row] = min(places[row], key=lambda place: load.get(place.worker, 0))
        load[least.worker] = load.get(least.worker, 0) + sizes[row]
    return chosen


def _starts(rows: Sequence[Row], sizes: Mapping[Row, int]) -> tuple[dict[Row, int], int]:
    """The byte at which each row begins in its consumer's buffer, and the end of the last one."""
    starts, at = {}, 0
    for row in rows:
        starts[row] = at
        at += sizes[row]
    return starts, at


def _moves(
    consumer: str, given: Mapping[Row, _Place], starts: Mapping[Row, int], sizes: Mapping[Row, int], order: list[str]
) -> list[Move]:
    """The moves to one consumer; sources in ``order`` (names of all workers), from the one after it on."""
    runs: dict[str, list[tuple[str, int, int, int]]] = {}
    for row, (worker, block, offset) in given.items():
        if not (size := sizes[row]):
            continue
        at, pieces = starts[row], runs.setdefault(worker, [])
        if pieces:
            last_block, last_offset, last_at, last_size = pieces[-1]
            if block == last_block and last_offset + last_size == offset and last_at + last_size == at:
                pieces[-1] = (block, last_offset, last_at, last_size + size)  # adjacent to the last at both ends
                continue
        pieces.append((block, offset, at, size))
    first = order.index(consumer) + 1
    return [
        Move(source, consumer, tuple(Piece(*piece) for piece in runs[source]))
        for source in order[first:] + order[:first]
        if source in runs
    ]
