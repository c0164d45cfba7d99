"""Traces replayed to a forecaster, and scores of its forecasts at every tool return.

Invariants
----------
1. A forecaster gets each event at its virtual time, and a trajectory's end after its last turn.
2. Each scored forecast was given before its truth was known, and with tokens left to generate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.agent_traces import Trace
from libra.facts import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.forecast import Forecaster
from libra.types import NO_TOOL, Phase

Floats = NDArray[np.float64]


class ScoredForecast(NamedTuple):
    """One forecast and its truth, in tokens."""

    key: str
    done: float
    mean: float
    order: float
    truth: float


def start(forecaster: Forecaster, trace: Trace) -> None:
    """Park the trajectory for the first time."""
    forecaster.handle(TrajectoryParked(trace.key, 0, Phase.ROLLOUT, 0, trace.group, trace.family))


def turn(forecaster: Forecaster, trace: Trace, index: int) -> bool:
    """Replay one turn; whether a tool returned."""
    made = trace.turns[index]
    forecaster.handle(QuantumFinished(trace.key, Phase.ROLLOUT, made.tokens, "", NO_TOOL, 0.0))
    if made.status:
        forecaster.handle(
            QuantumFinished(trace.key, Phase.TOOL, 0, made.tool, made.status, 0.0, payload_tokens=made.payload_tokens)
        )
    return bool(made.status)


def train_on(forecaster: Forecaster, traces: Iterable[Trace]) -> None:
    """Train a forecaster on trajectories, one after another."""
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
) -> list[ScoredForecast]:
    """Replay groups in this order; all members of one start together, as soon as all fit into ``in_flight``.

    With ``learn`` false nothing is learned from ended trajectories, and with ``completed`` false they do not count.
    """
    scored: list[ScoredForecast] = []
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
            scored.append(ScoredForecast(trace.key, done[number], forecast.mean_tokens, forecast.order_tokens, left))
        if index + 1 < len(trace.turns):
            heapq.heappush(heap, (now + trace.turns[index + 1].seconds, number, index + 1))
        else:
            forecaster.handle(TrajectoryEnded(trace.key, completed))
            if learn:
                forecaster.learn()
    return scored


def scores(scored: Sequence[ScoredForecast]) -> dict[str, float]:
    """R2 of the mean on tokens, of the order on logarithms, and Spearman's rank correlation of the order."""
    columns = np.array([item[1:] for item in scored])
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


def tail_recall(scored: Sequence[ScoredForecast], traces: Sequence[Trace], share: float) -> float:
    """Share of the longest tenth in the forecast's top tenth, when all running trajectories have generated ``share`` of the tail's
    threshold.

    All are ranked at the same number of tokens: at a share of its *own* length, progress would reveal the length.
    """
    threshold = float(np.quantile([trace.tokens for trace in traces], 0.9))
    totals = {trace.key: trace.tokens for trace in traces}
    first: dict[str, float] = {}
    for item in scored:
        if item.done >= share * threshold:
            first.setdefault(item.key, item.order + item.done)
    longest = [key for key in first if totals[key] >= threshold]
    if not longest:
        return 0.0
    ranked = sorted(first, key=lambda key: (-first[key], key))[: len(longest)]
    return len(set(ranked) & set(longest)) / len(longest)
