"""Transfer of a batch between workers, directly and through the scheduler: ``python -m benchmarks dispatch --json``.

Eight Dask worker processes, each with 46, 93 or 187 MiB of rows (EARL's three sizes: log-probabilities of contexts of 8, 16 and
32 thousand tokens). Every worker needs a slice of every producer's rows. In turns, with the same rows:

* *central*: ``client.gather`` of all parts, cut at the driver, ``client.scatter`` to the consumers; through the scheduler, Dask's
  default;
* *direct* (`libra.dispatch`): the driver plans from metadata; workers send requests over authenticated connections, and read each
  other's memory, since they are on one machine.

``direct_over_central`` is seconds of central over seconds of direct: per size the median of the pairs' ratios, then the
geometric mean of the sizes. ``scheduler_bytes`` is payload at the scheduler's connections in a direct transfer: every row has a
mark, and the scheduler's process searches every frame for it (in a separate pass that is not timed). The same count of a central
transfer, printed beside, shows that the search finds payload.

Source of goal and sizes: EARL (arXiv:2510.05943), figure 4, on its own network: 9.7, 11.0 and 11.2. Here all workers are on one
machine, so no network is the bottleneck, and the difference is in copies and work in Python.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import dask
from distributed import Client
from distributed.deploy.subprocess import SubprocessCluster

from benchmarks.live.dispatch_sides import Batch, central, check, clear, direct, lay_out, scheduler_traffic
from benchmarks.report import MIN_PAIRS, Figure, Pairs, alternate, command_parser, emit, seconds_of
from libra.cluster.connection import present_workers
from libra.cluster.settings import DASK_SETTINGS

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
