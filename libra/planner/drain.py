"""Seconds that engines take for their trajectories with draining, and the best concurrency. Pure.

The search counts an engine's work at full concurrency and each trajectory alone: a lower bound.
This module simulates the engine: trajectories are admitted up to its concurrency and advance
together at the current batch's decode rate, each prefill delays the others, and the batch drains at
the end.

Deviates from a real engine: tool time is spread evenly over a trajectory's tokens, every context
has its mean length, and each turn's context is computed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra.hardware.engine_seconds import EngineSeconds, MeasuredEngine
from libra.planner.cost import TrajectoryTotals
from libra.planner.planning_problem import Floats, Ints
from libra.types import StepSeconds


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """A workload on one kind of engine; each array (N,). ``alone_s``: seconds of a trajectory alone."""

    tokens: Floats
    prefill_s: Floats
    wait_s: Floats
    context_tokens: Floats
    alone_s: Floats
    engine: EngineSeconds

    @classmethod
    def of(cls, workload: TrajectoryTotals, engine: EngineSeconds, alone_s: Floats) -> Pace:
        """The pace of a workload; ``alone_s`` (N,) is the time of each trajectory alone on the engine."""
        context = workload.mean_context_tokens
        decode_s = workload.generated_tokens * engine.decode_steps_s(1, context)
        prefill_s = np.maximum(alone_s - workload.tool_wait_s - decode_s, 0.0)
        return cls(workload.generated_tokens, prefill_s, workload.tool_wait_s, context, alone_s, engine)

    def engine_s(self, items: Ints, concurrency: int, longest_first: bool = True) -> float:
        """Seconds until one engine finishes ``items`` at this concurrency, at least the longest alone."""
        if not len(items):
            return 0.0
        most = min(concurrency, len(items))
        step_s, waits = self._steps(items, most)
        tokens = np.maximum(self.tokens[items] + waits, 1e-9)
        order = np.argsort(-tokens if longest_first else tokens, kind="stable")
        queue, prefill_s = tokens[order].tolist(), self.prefill_s[items][order].tolist()
        active = [float(end) for end in queue[:most]]
        heapq.heapify(active)
        now_s, at, following = sum(prefill_s[:most]), 0.0, most
        while active:
            end = active[0]
            now_s += (end - at) * step_s[len(active)]
            at = end
            if following < len(queue):
                heapq.heapreplace(active, at + queue[following])
                now_s += prefill_s[following]
                following += 1
            else:
                heapq.heappop(active)
        return float(max(now_s, self.alone_s[items].max()))

    def _steps(self, items: Ints, most: int) -> tuple[list[float], Floats]:
        """Seconds per token with 0, ..., ``most`` in flight, and tool times (n,) in tokens."""
        tokens, waits = self.tokens[items], self.wait_s[items]
        context = float((self.context_tokens[items] * tokens).sum() / max(tokens.sum(), 1e-9))
        share, wait_tokens = 1.0, np.zeros(len(items))
        for _ in range(8):  # more waiting for tools means faster steps, and more tokens per second of waiting
            decoding = np.maximum(np.arange(most + 1) * share, 1.0)
            step_s = self.engine.decode_steps_s(decoding, decoding * context)
            wait_tokens = waits / step_s[-1]
            share = float(tokens.sum() / max((tokens + wait_tokens).sum(), 1e-9))
        return [float(value) for value in step_s], wait_tokens


def best_concurrency(pace: Pace, engines: list[Ints], most: int) -> tuple[int, float, float]:
    """The concurrency (``most``, 1/2, 1/4, ... of it) with the earliest end of all ``engines``.

    Also returns those seconds, and the seconds at this concurrency if the shortest trajectories
    start first.
    """
    halves = [max(most >> power, 1) for power in range(max(most, 1).bit_length())]
    times = [max(pace.engine_s(items, concurrency) for items in engines) for concurrency in halves]
    best = int(np.argmin(times))
    return halves[best], times[best], max(pace.engine_s(items, halves[best], longest_first=False) for items in engines)


@dataclass(frozen=True, slots=True)
class EvaluatedEngine:
    """One engine: pass times, slots, and KV capacity in tokens (infinite if unknown)."""

    steps: StepSeconds
    slots: int
    kv_tokens: float = float("inf")

    def most(self, final_tokens: Floats) -> int:
        """Concurrent trajectories that fit, given their final contexts (n,)."""
        room = self.kv_tokens / max(float(final_tokens.mean()), 1.0)
        return max(1, int(min(self.slots, room, len(final_tokens))))


def rollout_seconds(batch: TrajectoryTotals, engines: Sequence[EvaluatedEngine]) -> float:
    """Seconds until a batch is generated on these engines.

    Greedy, longest first: each trajectory goes to the engine that would finish it earliest.
    """
    context, tokens = batch.mean_context_tokens, batch.generated_tokens
    paces, loads_s = list[Pace](), list[Floats]()
    for engine in engines:
        steps = engine.steps
        prefill_s = steps.prefill_token_s * (batch.prompt_tokens + batch.observation_tokens)
        alone_s = prefill_s + batch.tool_wait_s + tokens * (steps.step_s(1, 0) + steps.context_token_s * context)
        paces.append(Pace.of(batch, MeasuredEngine(steps, 1, 1), alone_s))
        share = min(engine.most(batch.final_context_tokens), -(-len(batch) // len(engines)))
        pass_s = steps.step_s(share, share * float(context.mean()))
        loads_s.append(prefill_s + (tokens * pass_s + batch.tool_wait_s) / share)
    load_s, done_s = np.stack(loads_s), np.zeros(len(engines))
    engine_of = np.zeros(len(batch), dtype=np.int64)
    for item in np.argsort(-tokens, kind="stable"):
        at = int((done_s + load_s[:, item]).argmin())
        engine_of[item], done_s[at] = at, done_s[at] + load_s[at, item]
    final, ends_s = batch.final_context_tokens, [0.0]
    for number, (engine, pace) in enumerate(zip(engines, paces, strict=True)):
        if len(items := np.flatnonzero(engine_of == number)):
            ends_s.append(pace.engine_s(items, engine.most(final[items])))
    return max(ends_s)
