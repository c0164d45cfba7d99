"""Seconds that an engine takes for its trajectories, draining included, and the concurrency that minimises them.

The search counts an engine's work at full concurrency and each trajectory alone: a lower bound. Here the same engine is
simulated: it admits trajectories up to its concurrency, all advance together at the pace of a decode step of the current
batch, each prefill delays the others, and the batch drains at the end. Nothing changes between two events, so a trajectory
costs two events.

Differs from an engine: tool time is spread evenly over a trajectory's tokens, and every context has its mean length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from libra.planner.cost import TrajectoryTotals
from libra.planner.cost.rollout_cost import ManySeconds
from libra.planner.planning_problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """One kind of engine and a workload on it.

    Attributes
    ----------
    tokens, prefill_s, wait_s, context_tokens, alone_s : float arrays (N,)
        Of each trajectory: generated tokens, seconds of prefill, seconds with tools, mean context, seconds alone.
    engine : EngineSeconds with times for arrays
    """

    tokens: Floats
    prefill_s: Floats
    wait_s: Floats
    context_tokens: Floats
    alone_s: Floats
    engine: ManySeconds

    @classmethod
    def of(cls, workload: TrajectoryTotals, engine: ManySeconds, alone_s: Floats) -> Pace:
        """The pace of a workload; ``alone_s`` (N,) is the uncorrected time of each trajectory alone."""
        context = workload.mean_context_tokens
        decode_s = workload.generated_tokens * engine.decode_steps_s(1, context)
        prefill_s = np.maximum(alone_s - workload.tool_wait_s - decode_s, 0.0)
        return cls(workload.generated_tokens, prefill_s, workload.tool_wait_s, context, alone_s, engine)

    def engine_s(self, items: Ints, concurrency: int, longest_first: bool = True) -> float:
        """Seconds until one engine has finished ``items``, at most ``concurrency`` at once; never less than the longest alone."""
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
        """Seconds per token with 0, 1, ..., ``most`` trajectories in flight, and each trajectory's tool time in tokens of
        the full engine."""
        tokens, waits = self.tokens[items], self.wait_s[items]
        context = float((self.context_tokens[items] * tokens).sum() / max(tokens.sum(), 1e-9))
        share, wait_tokens = 1.0, np.zeros(len(items))
        for _ in range(8):  # the more of them wait for tools, the faster a step and the more tokens one wait equals
            decoding = np.maximum(np.arange(most + 1) * share, 1.0)
            step_s = self.engine.decode_steps_s(decoding, decoding * context)
            wait_tokens = waits / step_s[-1]
            share = float(tokens.sum() / max((tokens + wait_tokens).sum(), 1e-9))
        return [float(value) for value in step_s], wait_tokens


def best_concurrency(pace: Pace, engines: list[Ints], most: int) -> tuple[int, float, float]:
    """The concurrency, among ``most`` and its halves, that minimises the time at which the last of ``engines`` ends.

    Also returns those seconds, and the seconds if the shortest trajectories come first instead of the longest.
    """
    halves = [max(most >> power, 1) for power in range(max(most, 1).bit_length())]
    times = [max(pace.engine_s(items, concurrency) for items in engines) for concurrency in halves]
    best = int(np.argmin(times))
    return halves[best], times[best], max(pace.engine_s(items, halves[best], longest_first=False) for items in engines)
