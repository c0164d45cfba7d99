"""The watchdog of a run in the scheduler: looks for a stall, names the culprit, writes down its stacks, restarts its worker.

`libra.policy.stall` decides; this module brings time and picture, and acts. A restart is safe for quanta: what was
committed is in the journal, the quantum in flight is dispatched again, and after three such losses its trajectory ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tornado.ioloop import PeriodicCallback

from libra import keys
from libra.cluster.readiness import NEEDED
from libra.cluster.worker_stacks import stacks_of
from libra.policy.stall import Picture, RunningTask, Stall, Waiting, Watchdog
from libra.scheduler import dask_internals
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from libra.scheduler.run_state import RunState

logger = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 10
MIN_CHECK_S = 1.0


class StallGuard:
    """One per run that has ``watchdog.timeout_s``.

    Parameters
    ----------
    since : mapping
        Time of the last sign of each task that is on a worker, by key; ``time.monotonic`` seconds, kept by the plugin.
    phase_of : callable
        Phase a trajectory needs next or is in, by key.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        state: RunState,
        since: Mapping[str, float],
        phase_of: Callable[[str], Phase],
        timeout_s: float,
        restart: bool,
    ) -> None:
        self._scheduler, self._state, self._since, self._phase_of = scheduler, state, since, phase_of
        self._restart = restart
        self._stalls = 0
        self._acting: set[asyncio.Task[None]] = set()
        self.watchdog = Watchdog(timeout_s, time.monotonic())
        every_s = max(MIN_CHECK_S, timeout_s / CHECKS_PER_TIMEOUT)
        self._checks = PeriodicCallback(self._check, every_s * 1000)

    def start(self) -> None:
        """Look from now on."""
        self._checks.start()

    def stop(self) -> None:
        """Look no more; what is under way is left off."""
        self._checks.stop()
        for task in self._acting:
            task.cancel()

    def progressed(self) -> None:
        """Something of the run went on."""
        self.watchdog.progressed(time.monotonic())

    def granted(self) -> None:
        """Something was done that may end a stall, but is no progress yet: a worker joined."""
        self.watchdog.granted(time.monotonic())

    # ---------------------------------------------------------------- what it sees

    def _check(self) -> None:
        if self._acting:
            return
        now_s = time.monotonic()
        stall = self.watchdog.check(now_s, self._picture)
        if stall is not None:
            self._tell(stall, now_s)

    def _picture(self) -> Picture:
        running: list[RunningTask] = []
        waiting: list[Waiting] = []
        for key, ts in self._tasks():
            if ts.state == "processing" and ts.processing_on is not None:
                ws = ts.processing_on
                since_s = self._since.get(key, 0.0)  # 0: it was there before this plugin
                running.append(RunningTask(key, self._stage(key), str(ws.name), ws.address, since_s))
            elif ts.state in ("no-worker", "queued"):
                waiting.append(self._waiting(key, ts))
        resources = self._scheduler.resources
        return Picture(tuple(running), tuple(waiting), {name: sum(units.values()) for name, units in resources.items()})

    def _tasks(self) -> Iterator[tuple[str, TaskState]]:
        ending = f"-e{self._state.epoch}-{self._state.run}"
        return ((key, ts) for key, ts in self._scheduler.tasks.items() if isinstance(key, str) and key.endswith(ending))

    def _stage(self, key: str) -> str:
        parsed = keys.parse(key)
        if parsed is None:
            return key.partition("-")[0]
        return f"trajectory, {self._phase_of(key)}" if parsed.node == "trajectory" else parsed.node

    def _waiting(self, key: str, ts: TaskState) -> Waiting:
        parsed, state = keys.parse(key), self._state
        if not dask_internals.is_parked(ts) or parsed is None:
            resource = next(iter(ts.resource_restrictions or ()), "")
            return Waiting(key, f"a unit of {resource}" if resource else "any worker", resource)
        index, published = parsed.indices[0], state.admission.version
        if parsed.node == "gate":
            version = index if parsed.split == "eval" else index - state.eta
            return Waiting(key, f"version {version} (published is {published})", "")
        if parsed.node == "batch":
            return Waiting(key, f"the groups of batch {index} (published is version {published})", "")
        phase = str(self._phase_of(key))
        return Waiting(key, f"a slot of {phase}", phase)

    # ---------------------------------------------------------------- what it does

    def _tell(self, stall: Stall, now_s: float) -> None:
        self._stalls += 1
        state, culprit = self._state, stall.culprit
        restart = self._restart and culprit is not None
        file = f"stacks/{self._stalls:04d}-{culprit.worker.replace('/', '_')}.txt" if culprit is not None else ""
        last = state.last_event_text()
        state.emit(
            "stall_detected",
            key=culprit.key if culprit else "",
            worker=culprit.worker if culprit else "",
            address=culprit.address if culprit else "",
            stage=culprit.stage if culprit else "",
            idle_s=round(stall.idle_s, 3),
            parked=stall.waiting,
            detail=stall.detail,
            last_event=last,
            stacks=file,
            restarts=restart,
        )
        logger.warning(
            "run %s: no progress for %.0f s: %s; last event: %s; %s",
            state.run, stall.idle_s, stall.detail, last, self._advice(stall, file, restart),
        )  # fmt: skip
        if culprit is not None:
            task = asyncio.ensure_future(self._act(culprit, stall, file, now_s))
            self._acting.add(task)
            task.add_done_callback(self._acting.discard)

    def _advice(self, stall: Stall, file: str, restart: bool) -> str:
        if stall.culprit is None:
            options = [NEEDED[name][1] for name in stall.missing if name in NEEDED]
            commands = "; ".join(f"dask worker {self._scheduler.address} {each}" for each in dict.fromkeys(options))
            return f"type {commands}" if commands else f"see {self._state.directory / 'events.jsonl'}"
        written = f"its stacks go to {self._state.directory / file}"
        if restart:
            return f"{written}; its worker is restarted"
        ws = self._scheduler.workers.get(stall.culprit.address)
        by_hand = (
            f"type kill -9 {ws.pid} on {ws.host} to have its nanny restart it" if ws is not None and ws.nanny else ""
        )
        return "; ".join(filter(None, (written, by_hand, "watchdog.restart=true would do so by itself")))

    async def _act(self, culprit: RunningTask, stall: Stall, file: str, told_s: float) -> None:
        ws = self._scheduler.workers.get(culprit.address)
        if ws is None:
            return
        try:
            text = await stacks_of(self._scheduler, ws)
        except OSError as error:  # the process ends while it is asked
            text = f"(its stacks could not be had: {type(error).__name__}: {error})\n"
        self._write(file, f"{stall.detail}\nworker {ws.name}, process {ws.pid} on {ws.host}\n{text}")
        if not self._restart:
            return
        if self.watchdog.moved_since(told_s):
            logger.warning("run %s: it goes on, so worker %s is not restarted", self._state.run, culprit.worker)
            return
        answer = await dask_internals.restart_worker(
            self._scheduler, culprit.address, f"libra-watchdog-{self._state.run}"
        )
        self.granted()
        logger.warning("run %s: worker %s was restarted: %s", self._state.run, culprit.worker, answer)

    def _write(self, file: str, text: str) -> None:
        path = self._state.directory / file
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        except OSError as error:
            logger.warning("%s: the stacks of a stall cannot be written (%s):\n%s", path, error, text)
