"""The two sides of ``benchmarks.live.dispatch``: rows straight from worker to worker, and through the driver.

A batch is rows of as many log-probabilities (float32) as a context has tokens, on eight workers; afterwards every worker holds
the rows that its training rank wants, in one array, about an eighth of them from every producer.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client, Future, Scheduler, get_worker
from numpy.typing import NDArray

from libra.dispatch import Block, DispatchServer, Order, fetch, orders

MARK_BYTES = 16
"""Bytes of the random mark at the start of every row, which identifies payload anywhere."""
CHUNK_BYTES = 16 * 2**20
"""Bytes searched for marks at once."""
SCATTERS = 2
"""Arrays on their way to workers at once, through the driver."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that lies on the workers: what the driver knows of it."""

    client: Client
    workers: tuple[str, ...]
    mark: bytes
    secret: str
    num_rows: int
    row_tokens: int
    parts: tuple[Future, ...]
    blocks: tuple[Block, ...]
    addresses: dict[str, tuple[str, int]]
    wanted: dict[str, list[int]]

    @property
    def num_bytes(self) -> int:
        return self.num_rows * len(self.workers) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return 4 * self.row_tokens


def make_part(first: int, num_rows: int, row_tokens: int, mark: bytes) -> NDArray[np.float32]:
    """Rows of one producer: random log-probabilities behind the mark and the row's number."""
    part = np.random.default_rng(first).random((num_rows, row_tokens), np.float32)
    part.view(np.uint8)[:, :MARK_BYTES] = np.frombuffer(mark, np.uint8)
    part.view(np.int32)[:, MARK_BYTES // 4] = np.arange(first, first + num_rows)
    return part


def offer_part(part: NDArray[np.float32], first: int, secret: str) -> tuple[Block, tuple[str, int]]:
    worker: Any = get_worker()
    server = DispatchServer(worker.address, secret, "127.0.0.1")
    worker.libra_dispatch, worker.libra_part = server, part
    return server.offer_array("part", range(first, first + len(part)), part), server.address


def close_part(dask_worker: Any = None) -> None:
    dask_worker.libra_dispatch.close()
    dask_worker.libra_dispatch = dask_worker.libra_part = dask_worker.libra_slice = None


def lay_out(client: Client, workers: Sequence[str], num_rows: int, row_tokens: int) -> Batch:
    """Make ``num_rows`` rows of ``row_tokens`` per worker, to be "sliced" or "dealt"."""
    mark, secret = secrets.token_bytes(MARK_BYTES), secrets.token_hex(32)
    parts = [
        client.submit(make_part, i * num_rows, num_rows, row_tokens, mark, workers=[worker], pure=False)
        for i, worker in enumerate(workers)
    ]
    offered = client.gather(
        [
            client.submit(offer_part, part, i * num_rows, secret, workers=[worker], pure=False)
            for i, (worker, part) in enumerate(zip(workers, parts, strict=True))
        ]
    )
    wanted: dict[str, list[int]] = {worker: [] for worker in workers}
    for i in range(len(workers)):
        rows, num = range(i * num_rows, (i + 1) * num_rows), len(workers)
        for at, worker in enumerate(workers):
            wanted[worker] += rows[num_rows * at // num : num_rows * (at + 1) // num]
    return Batch(
        client, tuple(workers), mark, secret, num_rows, row_tokens, tuple(parts), tuple(block for block, _ in offered),
        {block.worker: address for block, address in offered}, wanted,
    )  # fmt: skip


def clear(batch: Batch) -> None:
    batch.client.run(close_part, workers=list(batch.workers))
    batch.client.cancel(list(batch.parts))


def take(order: Order, secret: str) -> tuple[int, int]:
    """The consumer of the direct side; returns bytes from other workers, and local ones."""
    worker: Any = get_worker()
    fetched = fetch(order, worker.address, secret=secret, own=worker.libra_dispatch)
    worker.libra_slice = fetched.data.view(np.float32)
    return fetched.received_bytes, fetched.local_bytes


def direct(batch: Batch) -> None:
    client = batch.client
    asked = orders(batch.blocks, batch.wanted, batch.addresses)
    futures = [
        client.submit(take, asked[worker], batch.secret, workers=[worker], pure=False) for worker in batch.workers
    ]
    got = client.gather(futures)
    total = sum(received + own for received, own in got)
    assert total == batch.num_bytes, f"{total} of {batch.num_bytes} bytes arrived"


def central(batch: Batch) -> list[Future]:
    client = batch.client
    parts = client.gather(list(batch.parts))

    def deliver(worker: str) -> Future:
        rows = np.asarray(batch.wanted[worker])
        producers = rows // batch.num_rows
        slices = [part[rows[producers == i] - i * batch.num_rows] for i, part in enumerate(parts)]
        future: Future = client.scatter(np.concatenate(slices), workers=[worker], hash=False)
        return future

    with ThreadPoolExecutor(SCATTERS) as threads:
        return list(threads.map(deliver, batch.workers))


def checksum(part: NDArray[np.float32] | None = None) -> int:
    """Crc32 of a consumer's rows, by default of the rows that the direct side left on this worker."""
    worker: Any = get_worker()
    rows = worker.libra_slice if part is None else part
    return zlib.crc32(memoryview(np.ascontiguousarray(rows)).cast("B"))


def check(batch: Batch, futures: Sequence[Future]) -> None:
    client = batch.client
    for worker, future in zip(batch.workers, futures, strict=True):
        theirs = client.submit(checksum, future, workers=[worker], pure=False).result()
        ours = client.submit(checksum, workers=[worker], pure=False).result()
        assert ours == theirs, f"{worker} has other rows by the direct way than by the driver's"


def count_scheduler(mark: bytes, dask_scheduler: Scheduler | None = None) -> None:
    """Count every byte and mark that the scheduler's process reads from or writes to a connection."""
    from distributed.comm import tcp

    counted = {"bytes": 0, "marks": 0}

    def count(frame: Any) -> None:
        view = memoryview(frame).cast("B")
        counted["bytes"] += len(view)
        for at in range(0, len(view), CHUNK_BYTES):  # a mark on a border is seen once: chunks overlap by less than it
            counted["marks"] += bytes(view[at : at + CHUNK_BYTES + len(mark) - 1]).count(mark)

    before = tcp.read_bytes_rw, tcp.TCP.write, tcp._add_frames_header

    async def reading(stream: Any, num_bytes: int) -> Any:
        frame = await before[0](stream, num_bytes)
        count(frame)
        return frame

    def writing(frames: Any) -> Any:
        with_header, sizes, total = before[2](frames)
        for frame in with_header:
            count(frame)
        return with_header, sizes, total

    tcp.read_bytes_rw, tcp._add_frames_header = reading, writing
    dask_scheduler.libra_counted = counted, before  # type: ignore[union-attr]


def counted(dask_scheduler: Scheduler | None = None) -> dict[str, int]:
    from distributed.comm import tcp

    found, before = dask_scheduler.libra_counted  # type: ignore[union-attr]
    tcp.read_bytes_rw, tcp._add_frames_header = before[0], before[2]
    return dict(found)


@contextlib.contextmanager
def scheduler_traffic(batch: Batch) -> Iterator[dict[str, int]]:
    """Payload and other bytes at the scheduler's connections meanwhile."""
    traffic: dict[str, int] = {}
    batch.client.run_on_scheduler(count_scheduler, batch.mark)
    yield traffic
    found = batch.client.run_on_scheduler(counted)
    traffic["payload"] = found["marks"] * batch.row_bytes
    traffic["other"] = found["bytes"] - traffic["payload"]
