"""A batch played through on engines whose passes are known (`StepSeconds`): seconds until its last trajectory is generated. Pure.

All trajectories that an engine runs gain a token per pass; a pass takes what the engine's own fit says for so many of them and
their contexts; computing a context holds the pass up for its seconds. Trajectories are taken longest first, each by the engine
with a free slot and room for its KV on which a pass would then be quickest. Between two events nothing changes.

Differs from an engine, as `libra.planner.engine_pace` does: a tool call is as many tokens of its trajectory as passes fit into it,
contexts are at their mean, and a turn's context is computed once. What is compared are two layouts, both played so.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from libra.errors import PlanError
from libra.planner.cost import Workload
from libra.types import StepSeconds


@dataclass(frozen=True, slots=True)
class PlayedEngine:
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
class _Playing:
    engine: PlayedEngine
    now_s: float = 0.0
    at_tokens: float = 0.0  # that whoever was there from the start would have been given
    ends: list[tuple[float, float, float]] = field(default_factory=list)  # heap: end in those tokens, context, room
    context: float = 0.0
    room: float = 0.0

    def pass_s(self, more: _Trajectory | None = None) -> float:
        """Seconds of a pass now, or with one more."""
        if more is None:
            return self.engine.steps.step_s(len(self.ends), self.context)
        return self.engine.steps.step_s(len(self.ends) + 1, self.context + more.context)

    def admits(self, one: _Trajectory) -> bool:
        """Whether a slot is free and its KV fits; an engine that is empty takes anybody."""
        return len(self.ends) < self.engine.slots and (not self.ends or self.room + one.final <= self.engine.kv_tokens)

    def admit(self, one: _Trajectory, now_s: float) -> None:
        self.advance(now_s)
        self.now_s += self.engine.steps.prefill_token_s * one.prefilled
        waited = one.tool_s / max(self.pass_s(one), 1e-9)
        heapq.heappush(self.ends, (self.at_tokens + max(one.tokens + waited, 1.0), one.context, one.final))
        self.context += one.context
        self.room += one.final

    def advance(self, to_s: float) -> None:
        if to_s > self.now_s:
            if self.ends:
                self.at_tokens += (to_s - self.now_s) / max(self.pass_s(), 1e-12)
            self.now_s = to_s

    def next_s(self) -> float:
        """When the next one ends."""
        return self.now_s + max(self.ends[0][0] - self.at_tokens, 0.0) * self.pass_s()

    def end_one(self) -> None:
        end, context, room = heapq.heappop(self.ends)
        self.at_tokens = max(self.at_tokens, end)
        self.context -= context
        self.room -= room


def played_s(batch: Workload, engines: Sequence[PlayedEngine]) -> float:
    """Seconds until all trajectories of a batch are generated.

    Raises
    ------
    PlanError
        There is no engine, or one without a slot.
    """
    if not engines or any(engine.slots < 1 for engine in engines):
        raise PlanError(f"a batch is played on engines with at least one slot each, got {list(engines)}")
    playing = [_Playing(engine) for engine in engines]
    queue, now_s = _longest_last(batch), 0.0
    while True:
        while queue:
            free = [one for one in playing if one.admits(queue[-1])]
            if not free:
                break
            best = min(free, key=lambda one: (one.pass_s(queue[-1]), len(one.ends)))
            best.admit(queue.pop(), now_s)
        busy = [one for one in playing if one.ends]
        if not busy:
            return now_s
        first = min(busy, key=lambda one: one.next_s())
        now_s = first.next_s()
        first.advance(now_s)
        first.end_one()


def _longest_last(batch: Workload) -> list[_Trajectory]:
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
