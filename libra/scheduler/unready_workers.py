"""Workers in the cluster that a run does not use yet: their setup for it is running, or has failed.

Dask reports a worker as running before its plugins are set up, and also if one of them fails, which only that worker's log
shows. Here an event, a line of the scheduler's log and the dashboard report it. The cause may be temporary (a file server
that did not answer, a full disk), so a worker with a nanny is restarted after a while.

Invariants
----------
1. A worker that joins during the run is in `rows` until it reports ready, or leaves.
2. Until then it gets no task of any run. The dispatcher, which assigns the slots of the two phases, is notified later; the
   resources that Dask assigns are withheld before a task can take them, and supplied once no run waits for the worker.
3. A failure while the run starts changes nothing here: it reaches the driver, which ends the run.
4. A worker is restarted only while it is `failed` for a run that has not ended: it has no task of any run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.facts import SetupFailed, WorkerSetupFailed
from libra.scheduler import dask_internals
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

SENT_BY_DASK = (keys.GRADE, keys.TRAIN, keys.COMMIT, keys.TEACHER)
"""Resources whose tasks Dask itself sends to a worker."""
RETRY_AFTER_S = (30.0, 120.0, 600.0)
"""Delay before a worker of the same name is restarted after its first, second and third setup failure in a row."""


@dataclass(slots=True)
class _Worker:
    name: str
    joined_s: float = field(default_factory=time.monotonic)
    failure: str = ""  # empty: its setup is running
    restart_s: float | None = None  # monotonic time of its restart


class NotReady:
    """The workers that joined during a run and are not ready, of every run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._workers: dict[str, dict[str, _Worker]] = {}  # by run, by address
        self._held: dict[str, dict[str, int]] = {}  # withheld resources, by address
        self._failures: Counter[tuple[str, str]] = Counter()  # in a row, by run and name of the worker

    def joined(self, run: str, address: str) -> None:
        """A worker begins its setup for a run. Call it before Dask sends the worker anything."""
        self._workers.setdefault(run, {})[address] = _Worker(dask_internals.worker_name(self._scheduler, address))
        if address not in self._held:
            self._held[address] = dask_internals.hold_back(self._scheduler, address, SENT_BY_DASK)

    def ready(self, run: str, address: str) -> None:
        """Its setup has ended."""
        self._failures.pop((run, dask_internals.worker_name(self._scheduler, address)), None)
        if self._workers.get(run, {}).pop(address, None) is not None:
            self._supply_if_free(address)

    def left(self, address: str) -> None:
        """It has left the cluster."""
        self._held.pop(address, None)
        for workers in self._workers.values():
            workers.pop(address, None)

    def ended(self, run: str) -> None:
        """A run has ended: no worker is set up for it any more."""
        for key in [key for key in self._failures if key[0] == run]:
            del self._failures[key]
        for address in self._workers.pop(run, {}):
            self._supply_if_free(address)

    def failed(self, state: RunState, fact: SetupFailed, address: str) -> None:
        """A worker reports that its setup for a run failed."""
        name, detail = fact.worker, fact.detail
        worker = self._workers.get(state.run, {}).get(address)
        after_s = self._retry_after_s(state.run, address) if worker is not None else None
        state.log.emit(WorkerSetupFailed(name, address, detail, after_s))
        if worker is None:
            return
        worker.failure = detail
        if after_s is not None:
            worker.restart_s = time.monotonic() + after_s
            self._scheduler.loop.call_later(after_s, self._restart, state.run, address)
        state.workers.engines.pop(name, None)
        state.workers.served.pop(name, None)
        state.notices.warn(
            logger,
            f"run {state.run}: worker {name} ({address}) joined, but its setup failed: {detail}; "
            f"{self._consequence(address)}. {self._advice(address, after_s)}",
            logging.ERROR,
        )

    def held(self) -> dict[str, dict[str, int]]:
        """What workers will supply once they are ready, by address and resource."""
        return {address: dict(resources) for address, resources in self._held.items()}

    def held_of(self, address: str) -> Mapping[str, int]:
        """What a worker will supply once it is ready, by resource; empty if it supplies all it has."""
        return self._held.get(address, {})

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Rows of a run: ``worker``, ``address``, ``stage`` ("setting_up", "failed"), ``for_s`` since it joined, ``detail``,
        ``again_in_s`` until its restart (None: there is none, or not automatically)."""
        now_s = time.monotonic()
        return [
            {
                "worker": worker.name,
                "address": address,
                "stage": "failed" if worker.failure else "setting_up",
                "for_s": round(now_s - worker.joined_s, 3),
                "detail": worker.failure,
                "again_in_s": None if worker.restart_s is None else round(max(0.0, worker.restart_s - now_s), 3),
            }
            for address, worker in sorted(self._workers.get(run, {}).items(), key=lambda item: item[1].name)
        ]

    def _supply_if_free(self, address: str) -> None:
        if not any(address in workers for workers in self._workers.values()):
            dask_internals.restore_supply(
                self._scheduler, address, self._held.pop(address, {}), f"libra-ready-{address}"
            )

    def _consequence(self, address: str) -> str:
        """What the run does without the worker."""
        resources = self._scheduler.workers[address].resources
        missed = [*self._held[address], *(name for name in (keys.ROLLOUT, keys.TOOL) if resources.get(name))]
        alone = [name for name in missed if not dask_internals.supply(self._scheduler, name).keys() - self._held.keys()]
        return (
            f"the run waits, because no other worker supplies {', '.join(alone)}"
            if alone
            else "the run goes on without it"
        )

    def _retry_after_s(self, run: str, address: str) -> float | None:
        """Delay before its restart; None after the last retry, or without a nanny."""
        ws = self._scheduler.workers[address]
        key = run, str(ws.name)
        self._failures[key] += 1
        tries = self._failures[key]
        return RETRY_AFTER_S[tries - 1] if ws.nanny and tries <= len(RETRY_AFTER_S) else None

    async def _restart(self, run: str, address: str) -> None:
        """Restart a worker, if its setup has still failed."""
        worker = self._workers.get(run, {}).get(address)
        if worker is None or not worker.failure:
            return
        worker.restart_s = None
        answer = await dask_internals.restart_worker(self._scheduler, address, f"libra-again-{run}")
        logger.warning("run %s: worker %s (%s) was restarted: %s", run, worker.name, address, answer)

    def _advice(self, address: str, after_s: float | None) -> str:
        """What an operator can do about it."""
        ws = self._scheduler.workers[address]
        by_hand = f"kill -9 {ws.pid} on {ws.host}"
        if after_s is not None:
            return f"It is restarted in {after_s:g} s; type {by_hand} to restart it at once; its log has the traceback"
        do = "and its nanny restarts it" if ws.nanny else "and start the worker again"
        return f"Fix the cause, then type {by_hand} {do}; its log has the traceback"
