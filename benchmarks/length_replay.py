"""Traces replayed to a forecaster, and how good what it said at every tool return was.

Invariants
----------
1. A forecaster hears only what has happened: an event goes to it at its virtual time, a trajectory's end after its last turn.
2. What is scored was said before its truth was known, and only where something was left to generate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.agent_traces import Trace
from libra.policy.forecast import Forecaster
from libra.policy.messages import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.types import NO_TOOL, Phase

Floats = NDArray[np.float64]


class Said(NamedTuple):
    """One forecast and its truth, in tokens."""

    key: str
    done: float
    mean: float
    order: float
    truth: float


def start(forecaster: Forecaster, trace: Trace) -> None:
    """The trajectory is parked for the first time."""
    forecaster.handle(TrajectoryParked(trace.key, 0, Phase.ROLLOUT, 0, trace.group, trace.family))


def turn(forecaster: Forecaster, trace: Trace, index: int) -> bool:
    """Tell of one turn; whether a tool returned."""
    made = trace.turns[index]
    forecaster.handle(QuantumFinished(trace.key, Phase.ROLLOUT, made.tokens, "", NO_TOOL, 0.0))
    if made.status:
        forecaster.handle(
            QuantumFinished(trace.key, Phase.TOOL, 0, made.tool, made.status, 0.0, payload_tokens=made.payload_tokens)
        )
    return bool(made.status)


def told(forecaster: Forecaster, traces: Iterable[Trace]) -> None:
    """Let it learn from trajectories one after another."""
    for trace in traces:
        start(forecaster, trace)
        for index in range(len(trace.turns)):
            turn(forecaster, trace, index)
        forecaster.handle(TrajectoryEnded(trace.key))
        forecaster.learn()


def replay(
    forecaster: Forecaster,
    groups: Sequence[Sequence[Trace]],
    in_flight: int,
    *,
    learn: bool = True,
    completed: bool = True,
    score: Callable[[Trace], bool] = lambda trace: True,
) -> list[Said]:
    """Groups start in this order, all members of one together, whenever all fit into ``in_flight``.

    With ``learn`` false nothing is learned from what ends, and with ``completed`` false it is not even counted.
    """
    said: list[Said] = []
    heap: list[tuple[float, int, int]] = []
    traces: list[Trace] = []
    done: list[int] = []
    ahead = list(reversed(groups))
    now = 0.0
    while ahead or heap:
        while ahead and (not heap or len(heap) + len(ahead[-1]) <= in_flight):
            for trace in ahead.pop():
                start(forecaster, trace)
                heapq.heappush(heap, (now + trace.turns[0].seconds, len(traces), 0))
                traces.append(trace)
                done.append(0)
        now, number, index = heapq.heappop(heap)
        trace = traces[number]
        done[number] += trace.turns[index].tokens
        returned = turn(forecaster, trace, index)
        left = trace.tokens - done[number]
        if returned and left > 0 and score(trace):
            forecast = forecaster.remaining(trace.key)
            said.append(Said(trace.key, done[number], forecast.mean_tokens, forecast.order_tokens, left))
        if index + 1 < len(trace.turns):
            heapq.heappush(heap, (now + trace.turns[index + 1].seconds, number, index + 1))
        else:
            forecaster.handle(TrajectoryEnded(trace.key, completed))
            if learn:
                forecaster.learn()
    return said


def scores(said: Sequence[Said]) -> dict[str, float]:
    """R2 of the mean on tokens, of the order on logarithms, and Spearman's rank correlation of the order."""
    columns = np.array([item[1:] for item in said])
    _, mean, order, truth = columns.T
    log, log_truth = np.log(np.maximum(order, 1.0)), np.log(truth)
    return {
        "r2": 1.0 - float(((truth - mean) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()),
        "logr2": 1.0 - float(((log_truth - log) ** 2).sum() / ((log_truth - log_truth.mean()) ** 2).sum()),
        "spearman": _correlation(_ranks(order), _ranks(truth)),
    }


def _ranks(values: Floats) -> Floats:
    """Ranks with ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[inverse]


def _correlation(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else 0.0


def tail_recall(said: Sequence[Said], traces: Sequence[Trace], share: float) -> float:
    """Of the longest tenth, how many are in the forecast's top tenth when all that live have generated ``share`` of the
    tail's threshold.

    All are ranked at the same number of tokens: at a share of its *own* length the progress would give the length away.
    """
    threshold = float(np.quantile([trace.tokens for trace in traces], 0.9))
    totals = {trace.key: trace.tokens for trace in traces}
    first: dict[str, float] = {}
    for item in said:
        if item.done >= share * threshold:
            first.setdefault(item.key, item.order + item.done)
    longest = [key for key in first if totals[key] >= threshold]
    if not longest:
        return 0.0
    ranked = sorted(first, key=lambda key: (-first[key], key))[: len(longest)]
    return len(set(ranked) & set(longest)) / len(longest)
