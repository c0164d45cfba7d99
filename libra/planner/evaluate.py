"""Seconds of a batch on engines whose passes are known (`StepSeconds`), by simulating it until its last trajectory ends. Pure.

All trajectories that an engine runs gain a token per pass; a pass takes the engine's own fit for that many of them and their
contexts; prefill delays the pass by its seconds. Trajectories are admitted longest first, each by the engine with a free
slot and KV memory whose pass would then be shortest. Between two events nothing changes.

Differs from an engine, as `libra.planner.engine_pace` does: a tool call counts as the tokens that passes would generate meanwhile,
contexts are at their mean, and a turn's context is computed once. Use it to compare two layouts that are evaluated in the
same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from libra.errors import PlanError
from libra.planner.cost import TrajectoryTotals
from libra.types import StepSeconds


@dataclass(frozen=True, slots=True)
class EvaluatedEngine:
    """One engine: seconds of its passes, trajectories at once, and tokens of KV that it holds (infinite: not known)."""

    steps: StepSeconds
    slots: int
    kv_tokens: float = float("inf")


@dataclass(frozen=True, slots=True)
class _Trajectory:
    tokens: float
    context: float  # on average while it is generated
    final: float
    prefilled: float
    tool_s: float


@dataclass(slots=True)
class _Running:
    """An engine at ``now_s``; ``at_tokens`` are those that a trajectory present from the start would have generated."""

    engine: EvaluatedEngine
    now_s: float = 0.0
    at_tokens: float = 0.0
    ends: list[tuple[float, float, float]] = field(default_factory=list)  # heap: end in at_tokens, context, room
    context: float = 0.0
    room: float = 0.0

    def pass_s(self, more: Sequence[_Trajectory] = ()) -> float:
        """Seconds of a pass with these trajectories added."""
        context = self.context + sum(one.context for one in more)
        return self.engine.steps.step_s(len(self.ends) + len(more), context)

    def admits(self, one: _Trajectory) -> bool:
        """Whether a slot is free and its KV fits; an empty engine admits any trajectory."""
        return len(self.ends) < self.engine.slots and (not self.ends or self.room + one.final <= self.engine.kv_tokens)

    def admit(self, one: _Trajectory, now_s: float) -> None:
        self.advance(now_s)
        self.now_s += self.engine.steps.prefill_token_s * one.prefilled
        waited = one.tool_s / max(self.pass_s([one]), 1e-9)
        heapq.heappush(self.ends, (self.at_tokens + max(one.tokens + waited, 1.0), one.context, one.final))
        self.context += one.context
        self.room += one.final

    def advance(self, to_s: float) -> None:
        if to_s > self.now_s:
            if self.ends:
                self.at_tokens += (to_s - self.now_s) / max(self.pass_s(), 1e-12)
            self.now_s = to_s

    def next_s(self) -> float:
        """When the next trajectory ends."""
        return self.now_s + max(self.ends[0][0] - self.at_tokens, 0.0) * self.pass_s()

    def end_one(self) -> None:
        end, context, room = heapq.heappop(self.ends)
        self.at_tokens = max(self.at_tokens, end)
        self.context -= context
        self.room -= room


def rollout_seconds(batch: TrajectoryTotals, engines: Sequence[EvaluatedEngine]) -> float:
    """Seconds until all trajectories of a batch are generated.

    Raises
    ------
    PlanError
        There is no engine, or one without a slot.
    """
    if not engines or any(engine.slots < 1 for engine in engines):
        raise PlanError(f"a batch is evaluated on engines with at least one slot each, got {list(engines)}")
    running = [_Running(engine) for engine in engines]
    queue, now_s = _longest_last(batch), 0.0
    while True:
        while queue:
            free = [one for one in running if one.admits(queue[-1])]
            if not free:
                break
            best = min(free, key=lambda one: (one.pass_s(queue[-1:]), len(one.ends)))
            best.admit(queue.pop(), now_s)
        busy = [one for one in running if one.ends]
        if not busy:
            return now_s
        first = min(busy, key=_Running.next_s)
        now_s = first.next_s()
        first.advance(now_s)
        first.end_one()


def _longest_last(batch: TrajectoryTotals) -> list[_Trajectory]:
    """The batch's trajectories, the longest at the end."""
    order = np.argsort(batch.generated_tokens, kind="stable")
    columns = (
        batch.generated_tokens,
        batch.mean_context_tokens,
        batch.final_context_tokens,
        batch.prompt_tokens + batch.observation_tokens,
        batch.tool_wait_s,
    )
    return [_Trajectory(*(float(column[at]) for column in columns)) for at in order]
