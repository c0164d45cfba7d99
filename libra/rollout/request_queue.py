"""The queue of requests in front of an engine's slots. Pure: no engine, no clock.

Invariants
1. A trajectory has at most one job: waiting, or running.
2. Jobs start in order of (priority, arrival); `RequestQueue.start` never has more than ``slots`` run.
3. A running job leaves by ``end`` only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from libra.errors import EngineError
from libra.types import TurnRequest


@dataclass(slots=True)
class QueuedJob:
    """A request with its times. ``ticket`` is its arrival number; times are perf_counter seconds."""

    ticket: int
    request: TurnRequest
    arrived_s: float
    started_s: float | None = None

    @property
    def name(self) -> str:
        """Its trajectory."""
        return self.request.trajectory_id


J = TypeVar("J", bound=QueuedJob)


@dataclass(slots=True)
class RequestQueue(Generic[J]):
    """Jobs waiting for one of ``slots`` places, and those that have one."""

    slots: int
    running: dict[str, J] = field(default_factory=dict)
    waiting: dict[str, J] = field(default_factory=dict)
    _order: list[tuple[tuple[int, ...], int, J]] = field(default_factory=list)

    def push(self, job: J) -> None:
        """Let a job wait; EngineError if its trajectory already has one."""
        if job.name in self.waiting or job.name in self.running:
            raise EngineError(f"{job.name}: already has a request in the engine; await it or abort it first")
        self.waiting[job.name] = job
        heapq.heappush(self._order, (tuple(job.request.priority), job.ticket, job))

    def first(self) -> J | None:
        """The job that starts next."""
        while self._order:
            job = self._order[0][2]
            if self.waiting.get(job.name) is job:
                return job
            heapq.heappop(self._order)  # it was removed while it waited
        return None

    def begin(self, job: J) -> None:
        """The `first` job gets its place."""
        heapq.heappop(self._order)
        self.running[job.name] = self.waiting.pop(job.name)

    def start(self) -> Iterator[J]:
        """Jobs that get one of the free places now, in order."""
        while len(self.running) < self.slots and (job := self.first()) is not None:
            self.begin(job)
            yield job

    def end(self, job: J) -> None:
        """The job has ended, waiting or running."""
        for place in (self.waiting, self.running):
            if place.get(job.name) is job:
                del place[job.name]
        if not self.waiting:
            self._order.clear()

    def find(self, trajectory_id: str) -> J | None:
        """The job of a trajectory, None if it has none."""
        return self.running.get(trajectory_id) or self.waiting.get(trajectory_id)

    def jobs(self) -> list[J]:
        """All jobs, running ones first."""
        return [*self.running.values(), *self.waiting.values()]
