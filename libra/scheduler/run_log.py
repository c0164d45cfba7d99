"""The event log of a run, as the scheduler writes it, and the cleanup after the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from libra import keys
from libra.errors import StoreError
from libra.facts import Fact, Line, to_json
from libra.observe.timeline.timeline import Timeline
from libra.policy.run_policies import RunPolicies
from libra.scheduler import scheduler_internals
from libra.store.event_log import EventLog

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

SNAPSHOT_EVENTS = 10_000  # events between two snapshots of the policy objects
SNAPSHOT_BYTES_PER_EVENT = 12  # a large snapshot is written less often

CLEAR_WAIT_S = 120.0  # longest time for which a start waits until the earlier one is cleared
KEPT_SEGMENTS = 1024  # worker states that are kept one by one, for the figures of the last minute
MOST_PENDING = 2000  # lines kept as objects until someone looks or the sampler writes


class RunLog:
    """Facts of a run, in seconds since ``started_s`` (Unix time), and snapshots of its policy.

    Lines are encoded and counted in `flush` or when `timeline` is read; without ``file`` they are
    only counted.
    """

    def __init__(self, run: str, file: EventLog | None, trainers: Sequence[str] = ()) -> None:
        self.started_s = time.time()
        self._timeline = Timeline(trainers, keep=KEPT_SEGMENTS)
        self._run, self._file = run, file
        self._pending: list[Line] = []
        self._newest: Line | None = None
        self._num_lines = 0
        self._next_snapshot = 0

    @property
    def uptime_s(self) -> float:
        return time.time() - self.started_s

    def emit(self, fact: Fact) -> None:
        self._newest = line = Line(self._run, round(time.time() - self.started_s, 6), fact)
        self._pending.append(line)
        if len(self._pending) >= MOST_PENDING:
            self._take_in()

    @property
    def timeline(self) -> Timeline:
        self._take_in()
        return self._timeline

    def _take_in(self) -> None:
        pending, self._pending = self._pending, []
        lines = []
        for line in pending:
            self._timeline.add(line)
            if self._file is not None:
                try:
                    lines.append(to_json(line))
                except StoreError as error:  # one line's value ends neither the log nor the run
                    logger.error("run %s: a line of its event log is left out: %s", self._run, error)
        if self._file is not None:
            self._num_lines += len(lines)
            self._file.write_lines(lines)

    @property
    def snapshot_is_due(self) -> bool:
        return self._num_lines >= self._next_snapshot

    def emit_snapshot(self, policies: RunPolicies, family: str) -> None:
        """Append a snapshot in a new segment, never between a fact and its commands."""
        if self._file is None:
            return
        self._take_in()
        self._file.rotate()
        line = to_json(Line(self._run, round(self.uptime_s, 6), policies.snapshot(family)))
        self._file.write_line(line)
        self._num_lines += 1
        self._next_snapshot = self._num_lines + max(SNAPSHOT_EVENTS, len(line) // SNAPSHOT_BYTES_PER_EVENT)

    def newest(self) -> str:
        if self._newest is None:
            return "none"
        _, t_s, fact = self._newest
        subjects = (getattr(fact, name) for name in ("key", "iteration", "address") if hasattr(fact, name))
        return f"{' '.join([fact.name, *map(str, subjects)])}, {self.uptime_s - t_s:.0f} s ago"

    def flush(self) -> None:
        self._take_in()
        if self._file is not None:
            self._file.flush()

    def close(self) -> EventLog | None:
        """Close and return the file, which may still be compressed; later facts are dropped."""
        self._take_in()
        file, self._file = self._file, None
        if file is not None:
            file.rotate()
            file.close(wait=False)
        return file


class EndedRuns:
    """Ended runs whose parts on workers and log segments are being removed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._removals: dict[asyncio.Task[None], str] = {}
        self._compressions: set[asyncio.Task[None]] = set()

    def driver_left(self, run: str) -> None:
        task = asyncio.ensure_future(self._remove_hosts(run))
        self._removals[task] = run
        task.add_done_callback(self._removals.pop)

    def compressing(self, log: EventLog | None) -> None:
        if log is not None and log.compresses:
            task = asyncio.ensure_future(asyncio.to_thread(log.wait_compressed))
            self._compressions.add(task)
            task.add_done_callback(self._compressions.discard)

    async def cleared(self, run: str) -> None:
        """Return when no worker has a part of the run, or after `CLEAR_WAIT_S`."""
        pending = {task for task, of in self._removals.items() if of == run}
        if pending and (await asyncio.wait(pending, timeout=CLEAR_WAIT_S))[1]:
            logger.warning("run %s: an earlier start is not cleared from all workers after %g s", run, CLEAR_WAIT_S)

    async def close(self) -> None:
        if self._compressions:
            await asyncio.wait(self._compressions)

    async def _remove_hosts(self, run: str) -> None:
        errors = await scheduler_internals.remove_worker_plugin(self._scheduler, keys.host_name(run))
        for worker, what in errors.items():
            logger.warning("run %s: its part on worker %s could not be removed: %s", run, worker, what)
