"""Workers that are in the cluster and take no part in a run: their part of it is being set up, or that failed.

A worker whose setup fails while a run goes on stays in Dask's cluster, and Dask says so nowhere but in that worker's own log. Here
it is told: by an event, by one line of the scheduler's log, and on the page for as long as it lasts.

Invariants
----------
1. Whoever joins in mid-run is in `rows` until it says that it is ready, or leaves.
2. One whose setup failed is sent nothing more, of no run: what it supplies is zeroed, never deleted, and given back when the
   run that it could not be set up for is over.
3. A failure where the run is only starting changes nothing here: it reaches the driver, which ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.scheduler import private

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState

logger = logging.getLogger(__name__)

SENT_BY_DASK = (keys.GRADE, keys.TRAIN, keys.COMMIT)
"""What a worker supplies that Dask itself gives out; slots of the two phases are given out by the dispatcher, to who is ready."""


@dataclass(slots=True)
class _Worker:
    name: str
    joined_s: float = field(default_factory=time.monotonic)
    failure: str = ""  # empty: it is being set up
    supplied: dict[str, int] = field(default_factory=dict)  # before it was withdrawn


class NotReady:
    """The workers that joined in mid-run and are not ready, of every run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._workers: dict[str, dict[str, _Worker]] = {}  # by run, by address

    def joined(self, run: str, address: str) -> None:
        """A worker begins to set up its part of a run that goes on."""
        self._workers.setdefault(run, {})[address] = _Worker(private.worker_name(self._scheduler, address))

    def ready(self, run: str, address: str) -> None:
        """It is done."""
        self._workers.get(run, {}).pop(address, None)

    def left(self, address: str) -> None:
        """It is no longer in the cluster."""
        for workers in self._workers.values():
            workers.pop(address, None)

    def failed(self, state: RunState, msg: Mapping[str, Any]) -> None:
        """A worker says that setting up its part of a run raised an error."""
        name, address = msg["name"], msg["address"]
        state.emit("worker_setup_failed", worker=name, address=address, detail=msg["detail"])
        worker = self._workers.get(state.run, {}).get(address)
        if worker is None or address not in self._scheduler.workers:
            return
        worker.failure = msg["detail"]
        state.engines.pop(name, None)
        state.served.pop(name, None)
        for resource in SENT_BY_DASK:
            count = self._scheduler.workers[address].resources.get(resource, 0)
            if count:
                worker.supplied[resource] = int(count)
                private.set_supply(self._scheduler, address, resource, 0)
        logger.error(
            "run %s: worker %s (%s) joined and takes no part, for its setup failed: %s; the run goes on without it. %s",
            state.run, name, address, msg["detail"], self._advice(address),
        )  # fmt: skip

    def ended(self, run: str) -> None:
        """A run is over: who could not be set up for it supplies again what it was started with."""
        for address, worker in self._workers.pop(run, {}).items():
            for resource, count in worker.supplied.items():
                if address in self._scheduler.workers and not self._out_elsewhere(address):
                    private.set_supply(self._scheduler, address, resource, count)

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Each of a run: ``worker``, ``address``, ``stage`` ("setting_up", "failed"), ``for_s`` since it joined, ``detail``."""
        now_s = time.monotonic()
        return [
            {
                "worker": worker.name,
                "address": address,
                "stage": "failed" if worker.failure else "setting_up",
                "for_s": round(now_s - worker.joined_s, 3),
                "detail": worker.failure,
            }
            for address, worker in sorted(self._workers.get(run, {}).items(), key=lambda item: item[1].name)
        ]

    def _out_elsewhere(self, address: str) -> bool:
        return any(address in workers and workers[address].failure for workers in self._workers.values())

    def _advice(self, address: str) -> str:
        """What to do about it."""
        ws = self._scheduler.workers[address]
        if ws.nanny:
            return f"Mend that, then type kill -9 {ws.pid} on {ws.host}: its nanny starts it anew (its log has the traceback)"
        return (
            f"Mend that, then stop process {ws.pid} on {ws.host} and start the worker anew (its log has the traceback)"
        )
