"""The watchdog of a run: detects a stall, writes a worker's stacks, and may restart the worker.

`libra.policy.stall` decides. A restart is safe for quanta: committed quanta are in the journal, and
the quantum in flight is dispatched again; after three such losses its trajectory ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tornado.ioloop import PeriodicCallback

from libra import facts, keys
from libra.cluster.readiness import NEEDED
from libra.cluster.worker_process import stacks_of
from libra.policy.stall import Limits, Picture, RunningTask, Stall, Waiting, Watchdog
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import RunState
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 10
MIN_CHECK_S = 1.0


class StallGuard:
    def __init__(
        self,
        scheduler: Scheduler,
        state: RunState,
        since: Mapping[str, float],
        phase_of: Callable[[str], Phase],
        limits: Limits,
        restart: bool,
    ) -> None:
        self._scheduler, self._state, self._since, self._phase_of = scheduler, state, since, phase_of
        self._restart, self._stalls = restart, 0
        self._acting: set[asyncio.Task[None]] = set()
        self.watchdog = Watchdog(limits, time.monotonic())
        every_s = max(MIN_CHECK_S, limits.floor_s / CHECKS_PER_TIMEOUT)
        self._checks = PeriodicCallback(self._check, every_s * 1000)
        self._checks.start()

    def stop(self) -> None:
        self._checks.stop()
        for task in self._acting:
            task.cancel()

    def progressed(self, key: str | None, since_s: float | None) -> None:
        """The run made progress; ``key`` ended or reported, and was last active at ``since_s``."""
        now_s = time.monotonic()
        if key is not None and since_s is not None:
            self.watchdog.limits.took(self._stage(key), now_s - since_s)
        self.watchdog.progressed(now_s)

    def granted(self) -> None:
        """An event that may end a stall but is not progress, such as a joining worker."""
        self.watchdog.granted(time.monotonic())

    def _check(self) -> None:
        now_s = time.monotonic()
        if not self._acting and (stall := self.watchdog.check(now_s, self._picture)) is not None:
            self._report(stall, now_s)

    def _picture(self) -> Picture:
        running: list[RunningTask] = []
        waiting: list[Waiting] = []
        ending = f"-e{self._state.epoch}-{self._state.run}"
        for key, ts in self._scheduler.tasks.items():
            if not isinstance(key, str) or not key.endswith(ending):
                continue
            if ts.state == "processing" and (ws := ts.processing_on) is not None:
                since_s = self._since.get(key, 0.0)  # 0: it was there before this plugin
                running.append(RunningTask(key, self._stage(key), str(ws.name), ws.address, since_s))
            elif ts.state in ("no-worker", "queued"):
                waiting.append(self._waiting(key, ts))
        resources = self._scheduler.resources
        return Picture(tuple(running), tuple(waiting), {name: sum(units.values()) for name, units in resources.items()})

    def _stage(self, key: str) -> str:
        parsed = keys.parse(key)
        if parsed is None:
            return key.partition("-")[0]
        return f"trajectory, {self._phase_of(key)}" if parsed.node == "trajectory" else parsed.node

    def _waiting(self, key: str, ts: TaskState) -> Waiting:
        parsed, state = keys.parse(key), self._state
        if not scheduler_internals.is_parked(ts) or parsed is None:
            resource = next(iter(ts.resource_restrictions or ()), "")
            return Waiting(key, f"a unit of {resource}" if resource else "any worker", resource)
        index, published = parsed.indices[0], state.admission.version
        if parsed.node == "trajectory":
            phase = str(self._phase_of(key))
            return Waiting(key, f"a slot of {phase}", phase)
        if parsed.node == "gate":
            version = index if parsed.split == "eval" else index - state.settings.run.eta
            return Waiting(key, f"version {version} (published is {published})", "")
        if parsed.node == "wave":
            return Waiting(key, f"groups for wave {parsed.indices[1]} of batch {index}, or its trainer", "")
        return Waiting(key, f"the groups of batch {index} (published is version {published})", "")

    def _report(self, stall: Stall, now_s: float) -> None:
        self._stalls += 1
        state, culprit, last = self._state, stall.culprit, self._state.log.newest()
        restart, at, file = self._restart and culprit is not None, ("", "", "", ""), ""
        if culprit is not None:
            at = culprit.key, culprit.worker, culprit.address, culprit.stage
            file = f"stacks/{self._stalls:04d}-{culprit.worker.replace('/', '_')}.txt"
            task = asyncio.ensure_future(self._act(culprit, stall, file, now_s))
            self._acting.add(task)
            task.add_done_callback(self._acting.discard)
        idle_s, detail = stall.idle_s, stall.detail
        state.log.emit(facts.StallDetected(*at, round(idle_s, 3), stall.waiting, detail, last, file, restart))
        self._warn(
            f"no progress for {idle_s:.0f} s: {detail}; last event: {last}; {self._advice(stall, file, restart)}"
        )

    def _warn(self, text: str) -> None:
        self._state.notices.warn(logger, f"run {self._state.run}: {text}")

    def _advice(self, stall: Stall, file: str, restart: bool) -> str:
        if stall.culprit is None:
            options = [NEEDED[name][1] for name in stall.missing if name in NEEDED]
            commands = "; ".join(f"dask worker {self._scheduler.address} {each}" for each in dict.fromkeys(options))
            return f"type {commands}" if commands else f"see {self._state.directory / 'events.jsonl'}"
        written = f"its stacks go to {self._state.directory / file}"
        if restart:
            return f"{written}; its worker is restarted"
        ws = self._scheduler.workers.get(stall.culprit.address)
        by_hand = f"; type kill -9 {ws.pid} on {ws.host} to have its nanny restart it" if ws and ws.nanny else ""
        return f"{written}{by_hand}; watchdog.restart=true does so automatically"

    async def _act(self, culprit: RunningTask, stall: Stall, file: str, reported_s: float) -> None:
        ws = self._scheduler.workers.get(culprit.address)
        if ws is None:
            return
        try:
            text = await stacks_of(self._scheduler, ws)
        except OSError as error:  # the process ended in the meantime
            text = f"(its stacks could not be read: {type(error).__name__}: {error})\n"
        text = f"{stall.detail}\nworker {ws.name}, process {ws.pid} on {ws.host}\n{text}"
        path = self._state.directory / file
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        except OSError as error:
            logger.warning("%s: the stacks of a stall cannot be written (%s):\n%s", path, error, text)
        if not self._restart:
            return
        if self.watchdog.progress_s > reported_s:
            self._warn(f"progress resumed, so worker {culprit.worker} is not restarted")
            return
        answer = await scheduler_internals.restart_worker(
            self._scheduler, culprit.address, f"libra-watchdog-{self._state.run}"
        )
        self.granted()
        self._warn(f"worker {culprit.worker} was restarted: {answer}")
