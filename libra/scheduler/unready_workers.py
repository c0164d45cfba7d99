"""Workers that are in the cluster and take no part in a run: their part of it is being set up, or that failed.

Dask calls a worker that joins running before its plugins are set up, and also where one of them fails: it says so nowhere but in
that worker's own log. Here it is told: by an event, by one line of the scheduler's log, and on the page for as long as it lasts.
What made it fail may pass (a file server that did not answer, a full disk), so a worker with a nanny is started anew after a while.

Invariants
----------
1. Whoever joins in mid-run is in `rows` until it says that it is ready, or leaves.
2. Until then it is sent nothing, of no run. Slots of the two phases are given out by the dispatcher, which is told of it later;
   what Dask itself gives out is held back before a task can have taken it, and supplied once no run waits for the worker.
3. A failure where the run is only starting changes nothing here: it reaches the driver, which ends the run.
4. A worker is started anew only while it is `failed` for a run that goes on: it has no task of any run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.scheduler import dask_internals

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState

logger = logging.getLogger(__name__)

SENT_BY_DASK = (keys.GRADE, keys.TRAIN, keys.COMMIT)
"""What is given out by Dask itself, to whoever supplies it."""
RETRY_AFTER_S = (30.0, 120.0, 600.0)
"""How long after its setup failed for the first, second and third time in a row a worker of that name is started anew."""


@dataclass(slots=True)
class _Worker:
    name: str
    joined_s: float = field(default_factory=time.monotonic)
    failure: str = ""  # empty: it is being set up
    again_s: float | None = None  # when it is started anew, on the monotonic clock


class NotReady:
    """The workers that joined in mid-run and are not ready, of every run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._workers: dict[str, dict[str, _Worker]] = {}  # by run, by address
        self._held: dict[str, dict[str, int]] = {}  # what is held back, by address
        self._failures: Counter[tuple[str, str]] = Counter()  # in a row, by run and name of the worker

    def joined(self, run: str, address: str) -> None:
        """A worker begins to set up its part of a run that goes on. Call it before Dask sends it anything."""
        self._workers.setdefault(run, {})[address] = _Worker(dask_internals.worker_name(self._scheduler, address))
        if address not in self._held:
            self._held[address] = dask_internals.hold_back(self._scheduler, address, SENT_BY_DASK)

    def ready(self, run: str, address: str) -> None:
        """It is done."""
        self._failures.pop((run, dask_internals.worker_name(self._scheduler, address)), None)
        if self._workers.get(run, {}).pop(address, None) is not None:
            self._supply_if_free(address)

    def left(self, address: str) -> None:
        """It is no longer in the cluster."""
        self._held.pop(address, None)
        for workers in self._workers.values():
            workers.pop(address, None)

    def ended(self, run: str) -> None:
        """A run is over: nobody is set up for it any more."""
        for key in [key for key in self._failures if key[0] == run]:
            del self._failures[key]
        for address in self._workers.pop(run, {}):
            self._supply_if_free(address)

    def failed(self, state: RunState, msg: Mapping[str, Any]) -> None:
        """A worker says that setting up its part of a run raised an error."""
        name, address, detail = msg["name"], msg["address"], msg["detail"]
        worker = self._workers.get(state.run, {}).get(address)
        after_s = self._retry_after_s(state.run, address) if worker is not None else None
        state.emit("worker_setup_failed", worker=name, address=address, detail=detail, retry_after_s=after_s)
        if worker is None:
            return
        worker.failure = detail
        if after_s is not None:
            worker.again_s = time.monotonic() + after_s
            self._scheduler.loop.call_later(after_s, self._again, state.run, address)
        state.engines.pop(name, None)
        state.served.pop(name, None)
        logger.error(
            "run %s: worker %s (%s) joined and takes no part, for its setup failed: %s; %s. %s",
            state.run, name, address, detail, self._consequence(address), self._advice(address, after_s),
        )  # fmt: skip

    def held(self) -> dict[str, dict[str, int]]:
        """What workers will supply once they are ready, by address and resource."""
        return {address: dict(resources) for address, resources in self._held.items()}

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Each of a run: ``worker``, ``address``, ``stage`` ("setting_up", "failed"), ``for_s`` since it joined, ``detail``,
        ``again_in_s`` until it is started anew (None: it is not, or not by itself)."""
        now_s = time.monotonic()
        return [
            {
                "worker": worker.name,
                "address": address,
                "stage": "failed" if worker.failure else "setting_up",
                "for_s": round(now_s - worker.joined_s, 3),
                "detail": worker.failure,
                "again_in_s": None if worker.again_s is None else round(max(0.0, worker.again_s - now_s), 3),
            }
            for address, worker in sorted(self._workers.get(run, {}).items(), key=lambda item: item[1].name)
        ]

    def _supply_if_free(self, address: str) -> None:
        if not any(address in workers for workers in self._workers.values()):
            dask_internals.supply_again(self._scheduler, address, self._held.pop(address, {}), f"libra-ready-{address}")

    def _consequence(self, address: str) -> str:
        """What the run does without it."""
        resources = self._scheduler.workers[address].resources
        missed = [*self._held[address], *(name for name in (keys.ROLLOUT, keys.TOOL) if resources.get(name))]
        alone = [name for name in missed if not dask_internals.supply(self._scheduler, name).keys() - self._held.keys()]
        return f"the run waits, for nobody else supplies {', '.join(alone)}" if alone else "the run goes on without it"

    def _retry_after_s(self, run: str, address: str) -> float | None:
        """How long until it is started anew; None where that was done often enough, or nobody would."""
        ws = self._scheduler.workers[address]
        key = run, str(ws.name)
        self._failures[key] += 1
        tries = self._failures[key]
        return RETRY_AFTER_S[tries - 1] if ws.nanny and tries <= len(RETRY_AFTER_S) else None

    async def _again(self, run: str, address: str) -> None:
        """Start a worker anew, if it still takes no part for the same reason."""
        worker = self._workers.get(run, {}).get(address)
        if worker is None or not worker.failure:
            return
        worker.again_s = None
        answer = await dask_internals.restart_worker(self._scheduler, address, f"libra-again-{run}")
        logger.warning("run %s: worker %s (%s) was started anew: %s", run, worker.name, address, answer)

    def _advice(self, address: str, after_s: float | None) -> str:
        """What to do about it."""
        ws = self._scheduler.workers[address]
        by_hand = f"kill -9 {ws.pid} on {ws.host}"
        if after_s is not None:
            return (
                f"It is started anew in {after_s:g} s; type {by_hand} to have that at once; its log has the traceback"
            )
        do = "and its nanny starts it anew" if ws.nanny else "and start the worker anew"
        return f"Mend that, then type {by_hand} {do}; its log has the traceback"
