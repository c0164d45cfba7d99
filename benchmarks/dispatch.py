"""Transfer of a batch between workers, directly and through the scheduler: ``python -m benchmarks.dispatch --json``.

Eight Dask worker processes, each with 46, 93 or 187 MiB of rows (EARL's three sizes: log-probabilities of contexts of 8, 16 and
32 thousand tokens). Every worker needs a slice of every producer's rows. In turns, with the same rows:

* *central*: ``client.gather`` of all parts, cut at the driver, ``client.scatter`` to the consumers; through the scheduler, Dask's
  default;
* *direct* (`libra.dispatch`): the driver plans from metadata; workers send requests over authenticated connections, and read each
  other's memory, since they are on one machine.

Printed beside, measured in the same turns: direct with every byte over TCP and a checksum, as between machines
(``neighbours=False``); and central with ``direct=True``, where the driver talks to the workers itself.

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
import sys
import time
from pathlib import Path

import dask
from distributed import Client, Future
from distributed.deploy.subprocess import SubprocessCluster

from benchmarks.dispatch_sides import Batch, central, check, clear, direct, lay_out, scheduler_traffic
from benchmarks.report import MIN_PAIRS, Figure, Pairs, alternate, command_parser, emit
from libra.cluster.connection import present_workers
from libra.cluster.settings import DASK_SETTINGS

WORKERS = 8
SIZES = {46: 8192, 93: 16384, 187: 32768}
"""MiB per worker, and tokens of a row: the longer the context, the longer the rows, of which there are 1,472 to 1,496."""
SIDES = ("central", "direct", "direct over TCP", "central past the scheduler")
GOAL = 9.7
COUNTED_CENTRAL_MIB = 46
"""Largest size at which a central transfer is searched for marks."""


def seconds(batch: Batch, side: str) -> float:
    """Wall time of one transfer by one of `SIDES`."""
    began = time.perf_counter()
    futures: list[Future] = []
    if side.startswith("direct"):
        direct(batch, neighbours=side == "direct")
    else:
        futures = central(batch, past_scheduler=side != "central")
    took = time.perf_counter() - began
    batch.client.cancel(futures)
    return took


def once_checked(batch: Batch) -> None:
    """Each side once, not timed: connections open, and the same rows arrive."""
    futures = central(batch)
    for neighbours in (True, False):
        direct(batch, neighbours=neighbours)
        check(batch, futures)
    batch.client.cancel(futures)


def measure(batch: Batch, pairs: int, mib: int) -> Pairs:
    """(central, direct) in turns; prints all sides' medians and ratios."""
    beside: dict[str, list[float]] = {side: [] for side in SIDES[2:]}

    def after(index: int, first: float, second: float) -> None:
        for side, times in beside.items():
            times.append(seconds(batch, side))
        others = ", ".join(f"{side} {times[-1]:.2f} s" for side, times in beside.items())
        print(f"  {mib} MiB, pair {index + 1}: central {first:.2f} s, direct {second:.2f} s; {others}", flush=True)

    timed = alternate(
        lambda: seconds(batch, "central"), lambda: seconds(batch, "direct"), pairs=pairs, after_pair=after
    )
    over_tcp, past = (statistics.median(beside[side]) for side in SIDES[2:])
    central_s, direct_s = timed.medians
    print(
        f"{mib} MiB per worker: central {central_s:.2f} s, direct {direct_s:.2f} s: ratio {timed.ratio:.2f} of pairs "
        f"{', '.join(f'{ratio:.1f}' for ratio in timed.ratios)}\n"
        f"  over TCP alone {over_tcp:.2f} s: {central_s / over_tcp:.2f}; central past the scheduler {past:.2f} s: "
        f"{past / direct_s:.2f} over direct, {past / over_tcp:.2f} over direct by TCP alone",
        flush=True,
    )
    return timed


def traffic(batch: Batch, mib: int) -> tuple[int, int]:
    """Payload and other bytes at the scheduler's connections in one direct transfer."""
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


def main() -> None:
    """Measure all sizes and print the figures."""
    parser = command_parser("dispatch", __doc__, pairs=MIN_PAIRS)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="MiB per worker")
    parser.add_argument("--layout", choices=("sliced", "dealt"), default="sliced", help="rows a consumer wants")
    options = parser.parse_args()
    repository = str(Path(__file__).resolve().parents[1])
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
            batch = lay_out(client, workers, mib * 2**18 // SIZES[mib], SIZES[mib], options.layout)
            once_checked(batch)
            ratios.append(measure(batch, options.pairs, mib).ratio)
            found = traffic(batch, mib)
            payload, other = payload + found[0], max(other, found[1])
            clear(batch)
    figures = {
        "direct_over_central": Figure(statistics.geometric_mean(ratios), "ratio", "higher", GOAL),
        "scheduler_bytes": Figure(payload, "bytes", "lower", 0),
    }
    print(f"metadata at the scheduler, at most: {other} bytes a transfer")
    emit("dispatch", figures, arguments=sys.argv[1:], as_json=options.json)


if __name__ == "__main__":
    main()
