"""Transfer of a batch between workers, directly and through the scheduler: ``python -m benchmarks
dispatch --json``.

Eight Dask worker processes, each with 46, 93 or 187 MiB of rows (EARL's three sizes:
log-probabilities of contexts of 8, 16 and 32 thousand tokens). Every worker needs a slice of every
producer's rows. In turns, with the same rows:

* *central*: ``client.gather`` of all parts, cut at the driver, ``client.scatter`` to the consumers;
  through the scheduler, Dask's default;
* *direct* (`libra.dispatch`): the driver plans from metadata; workers send requests over
  authenticated connections, and read each other's memory, since they are on one machine.

``direct_over_central`` is seconds of central over seconds of direct: per size the median of the
pairs' ratios, then the geometric mean of the sizes. ``scheduler_bytes`` is payload at the
scheduler's connections in a direct transfer: every row has a mark, and the scheduler's process
searches every frame for it (in a separate pass that is not timed). The same count of a central
transfer, printed beside, shows that the search finds payload.

Source of goal and sizes: EARL (arXiv:2510.05943), figure 4, on its own network: 9.7, 11.0 and 11.2.
Here all workers are on one machine, so no network is the bottleneck, and the difference is in
copies and work in Python.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Future, Scheduler, get_worker
from distributed.deploy.subprocess import SubprocessCluster
from numpy.typing import NDArray

from benchmarks.report import MIN_PAIRS, Figure, Pairs, alternate, command_parser, emit, seconds_of
from libra.cluster.connection import present_workers
from libra.cluster.settings import DASK_SETTINGS
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


WORKERS = 8
SIZES = {46: 8192, 93: 16384, 187: 32768}
"""MiB per worker, and tokens of a row."""
GOAL = 9.7
COUNTED_CENTRAL_MIB = 46
"""Largest size at which a central transfer is searched for marks."""


def measure(batch: Batch, pairs: int, mib: int) -> Pairs:
    """(central, direct) in turns, after an untimed round of each."""
    futures = central(batch)
    direct(batch)
    check(batch, futures)
    batch.client.cancel(futures)

    def central_s() -> float:
        held: list[Any] = []
        took = seconds_of(lambda: held.extend(central(batch)))
        batch.client.cancel(held)
        return took

    timed = alternate(central_s, lambda: seconds_of(lambda: direct(batch)), pairs=pairs)
    ratios = ", ".join(f"{ratio:.1f}" for ratio in timed.ratios)
    first, second = timed.medians
    print(f"{mib} MiB per worker: central {first:.2f} s, direct {second:.2f} s, ratios of pairs {ratios}", flush=True)
    return timed


def traffic(batch: Batch, mib: int) -> tuple[int, int]:
    with scheduler_traffic(batch) as found:
        direct(batch)
    print(f"  {mib} MiB, direct: {found['payload']} bytes of payload and {found['other']} others at the scheduler")
    if mib <= COUNTED_CENTRAL_MIB:
        with scheduler_traffic(batch) as through:
            batch.client.cancel(central(batch))
        print(
            f"  {mib} MiB, central: {through['payload']} bytes of payload and {through['other']} others at the scheduler"
        )
        assert through["payload"] >= 2 * batch.num_bytes, "the count does not see payload that does pass"
    return found["payload"], found["other"]


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("dispatch", __doc__, pairs=MIN_PAIRS)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="MiB per worker")
    options = parser.parse_args(arguments)
    repository = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([repository, os.environ.get("PYTHONPATH", "")])
    ratios, payload, other = [], 0, 0
    with (
        dask.config.set(DASK_SETTINGS),
        SubprocessCluster(
            n_workers=WORKERS, threads_per_worker=2, dashboard_address=None, worker_kwargs={"memory_limit": 0}
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(WORKERS)
        workers = sorted(present_workers(client))
        for mib in options.sizes:
            batch = lay_out(client, workers, mib * 2**18 // SIZES[mib], SIZES[mib])
            ratios.append(measure(batch, options.pairs, mib).ratio)
            found = traffic(batch, mib)
            payload, other = payload + found[0], max(other, found[1])
            clear(batch)
    figures = {
        "direct_over_central": Figure(statistics.geometric_mean(ratios), "ratio", "higher", GOAL),
        "scheduler_bytes": Figure(payload, "bytes", "lower", 0),
    }
    print(f"metadata at the scheduler, at most: {other} bytes a transfer")
    emit("dispatch", figures, arguments=arguments, as_json=options.json)
