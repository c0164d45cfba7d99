"""What a request must fulfil before any engine takes it, and who is served first where an engine queues by itself.

Pure: no engine, no clock. `check_request` touches no state, so any thread may call it.

Invariants of `RequestQueue`
1. A trajectory has at most one job: waiting, or running.
2. Jobs start in order of (priority, arrival), and never more than ``slots`` run.
3. A running job leaves by ``end`` only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from libra.errors import ContextOverflow, EngineError
from libra.types import TurnRequest

PRIORITY_BITS = (20, 10, 30)
"""Bits of each entry of a priority in one number: up to a million iterations, a thousand levels, a thousand million places."""


def check_request(request: TurnRequest, *, max_context_tokens: int, vocab_size: int) -> None:
    """Raise where a request cannot be served at all: ContextOverflow where it is too long, else EngineError."""
    name, context, new = request.trajectory_id, len(request.context_ids), request.max_new_tokens
    if context < 1 or new < 1:
        raise EngineError(f"{name}: got {context} context tokens and max_new_tokens={new}; both must be at least 1")
    if context + new > max_context_tokens:
        raise ContextOverflow(
            f"{name}: {context} context tokens + {new} new ones = {context + new}, more than the engine's "
            f"{max_context_tokens}; ask for at most {max_context_tokens - context} new tokens, "
            f"or type rollout.max_context_tokens={context + new}"
        )
    if not (request.temperature >= 0 and 0 < request.top_p <= 1 and request.seed >= 0):
        raise EngineError(
            f"{name}: got temperature={request.temperature}, top_p={request.top_p}, seed={request.seed}; "
            "allowed: temperature >= 0, 0 < top_p <= 1, seed >= 0"
        )
    low, high = int(request.context_ids.min()), int(request.context_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(f"{name}: context ids from {low} to {high}; the model knows 0 to {vocab_size - 1}")


def packed_priority(priority: tuple[int, ...]) -> int:
    """One non-negative number below 2**60 in the order of the tuples: ``a < b`` exactly where their tuples are.

    Raises
    ------
    EngineError
        More entries than `PRIORITY_BITS` has, or one below -1 (a level of those that are overdue) or too large for its bits.
    """
    if len(priority) > len(PRIORITY_BITS) or any(
        not -1 <= part <= 2**bits - 3 for part, bits in zip(priority, PRIORITY_BITS, strict=False)
    ):
        allowed = ", ".join(f"-1 to {2**bits - 3}" for bits in PRIORITY_BITS)
        raise EngineError(f"priority: got {priority}; allowed are at most {len(PRIORITY_BITS)} entries of {allowed}")
    packed = 0
    for position, bits in enumerate(PRIORITY_BITS):  # an entry that is missing sorts before any, as in tuples
        packed = packed << bits | (priority[position] + 2 if position < len(priority) else 0)
    return packed


@dataclass(slots=True)
class QueuedJob:
    """A request on its way.

    ``ticket`` is its arrival number; times are perf_counter seconds; ``handle``, ``answer`` and ``task`` are the engine's: its name
    for the request, the future that its caller awaits, and the task that serves it.
    """

    ticket: int
    request: TurnRequest
    arrived_s: float
    started_s: float | None = None
    version: int = 0  # of the weights when it started
    handle: str = ""
    answer: Any = None
    task: Any = None

    @property
    def name(self) -> str:
        """Its trajectory."""
        return self.request.trajectory_id


@dataclass(slots=True)
class RequestQueue:
    """Jobs waiting for one of ``slots`` places, and those that have one."""

    slots: int
    running: dict[str, QueuedJob] = field(default_factory=dict)
    waiting: dict[str, QueuedJob] = field(default_factory=dict)
    _order: list[tuple[tuple[int, ...], int, QueuedJob]] = field(default_factory=list)

    def push(self, job: QueuedJob) -> None:
        """Let a job wait; EngineError where its trajectory already has one."""
        if job.name in self.waiting or job.name in self.running:
            raise EngineError(f"{job.name}: already has a request in the engine; await it or abort it first")
        self.waiting[job.name] = job
        heapq.heappush(self._order, (tuple(job.request.priority), job.ticket, job))

    def start(self) -> Iterator[QueuedJob]:
        """Jobs that get a place now, in order."""
        while self.waiting and len(self.running) < self.slots:
            job = heapq.heappop(self._order)[2]
            if self.waiting.get(job.name) is job:  # else it left while it waited
                del self.waiting[job.name]
                self.running[job.name] = job
                yield job

    def end(self, job: QueuedJob) -> None:
        """The job is over, wherever it was."""
        for place in (self.waiting, self.running):
            if place.get(job.name) is job:
                del place[job.name]
        if not self.waiting:
            self._order.clear()

    def find(self, trajectory_id: str) -> QueuedJob | None:
        """The job of a trajectory, None where it has none."""
        return self.running.get(trajectory_id) or self.waiting.get(trajectory_id)

    def jobs(self) -> list[QueuedJob]:
        """All of them, running ones first."""
        return [*self.running.values(), *self.waiting.values()]
