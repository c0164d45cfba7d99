"""Turns of real agents replayed to a forecaster, and scores of its forecasts at every tool return.

1. A forecaster gets each event at its virtual time, and a trajectory's end after its last turn.
2. Each scored forecast was given before its truth was known, and with tokens left to generate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.facts import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.planner.agent_turns import AgentTurn, agent_turn_files, read_agent_turns
from libra.policy.forecast import Forecaster
from libra.types import NO_TOOL, Phase, ToolOutcome

KNOWN = ("mini_swe", "agentcgroup", "tau")
"""Sets whose file name is longer, e.g. ``tau_airline_gpt4o.csv``."""
REQUIRED = ("source", "task", "sample", "tool", "status", "payload_chars", "completion_tokens")
TOKEN_S, TOOL_S = 0.02, 0.1
"""Seconds per generated token, and of a tool, if the trace has none."""


class Turn(NamedTuple):
    """One generation of ``tokens`` and its tool's result; `NO_TOOL`: the last turn."""

    tokens: int
    tool: str
    status: ToolOutcome
    payload_tokens: int
    seconds: float

    @classmethod
    def of(cls, turn: AgentTurn) -> Turn:
        llm_s = TOKEN_S * turn.completion_tokens if turn.llm_s is None else turn.llm_s
        seconds = llm_s + (TOOL_S if turn.tool_s is None else turn.tool_s) if turn.gap_s is None else turn.gap_s
        return cls(turn.completion_tokens, turn.tool, turn.status, turn.payload_tokens, max(seconds, 1e-3))


class Trace(NamedTuple):
    """A recorded trajectory: its prompt (``group``), its environment (``family``), its turns."""

    key: str
    task: str
    group: str
    family: str
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


class ScoredForecast(NamedTuple):
    """One forecast and its truth, in tokens."""

    mean: float
    order: float
    truth: float


def sets_in(data: Path) -> dict[str, Path]:
    return {next((n for n in KNOWN if path.stem.startswith(n)), path.stem): path for path in agent_turn_files(data)}


def read_traces(path: Path) -> list[Trace]:
    """The trajectories of one file, in its order, without those that generated nothing."""
    found = []
    for one in read_agent_turns(path, REQUIRED):
        group = "/".join(filter(None, (one.source, one.model, one.task)))
        key = "/".join(filter(None, (group, one.sample)))
        found.append(Trace(key, one.task, group, one.source, tuple(map(Turn.of, one.turns))))
    return [trace for trace in found if trace.tokens > 0]


def start(forecaster: Forecaster, trace: Trace) -> None:
    forecaster.handle(TrajectoryParked(trace.key, 0, Phase.ROLLOUT, 0, trace.group, trace.family))


def replay_turn(forecaster: Forecaster, trace: Trace, index: int) -> bool:
    made = trace.turns[index]
    forecaster.handle(QuantumFinished(trace.key, Phase.ROLLOUT, made.tokens, "", NO_TOOL, 0.0))
    if made.status:
        returned = QuantumFinished(
            trace.key, Phase.TOOL, 0, made.tool, made.status, 0.0, payload_tokens=made.payload_tokens
        )
        forecaster.handle(returned)
    return bool(made.status)


def train_on(forecaster: Forecaster, traces: Iterable[Trace]) -> None:
    for trace in traces:
        start(forecaster, trace)
        for index in range(len(trace.turns)):
            replay_turn(forecaster, trace, index)
        forecaster.handle(TrajectoryEnded(trace.key))
        forecaster.learn()


def replay(
    forecaster: Forecaster,
    groups: Sequence[Sequence[Trace]],
    in_flight: int,
    *,
    learn: bool = True,
    completed: bool = True,
) -> list[ScoredForecast]:
    """Replay groups in order; a group starts as soon as it fits into ``in_flight``.

    ``learn=False`` learns nothing from ended trajectories; ``completed=False`` ignores them.
    """
    scored: list[ScoredForecast] = []
    heap: list[tuple[float, int, int]] = []
    traces, done, ahead, now = list[Trace](), list[int](), list(reversed(groups)), 0.0
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
        left = trace.tokens - done[number]
        if replay_turn(forecaster, trace, index) and left > 0:
            forecast = forecaster.remaining(trace.key)
            scored.append(ScoredForecast(forecast.mean_tokens, forecast.order_tokens, left))
        if index + 1 < len(trace.turns):
            heapq.heappush(heap, (now + trace.turns[index + 1].seconds, number, index + 1))
        else:
            forecaster.handle(TrajectoryEnded(trace.key, completed))
            if learn:
                forecaster.learn()
    return scored


def scores(scored: Sequence[ScoredForecast]) -> dict[str, float]:
    mean, order, truth = np.array(scored, float).T
    ranks, true_ranks = (_ranks(each) - _ranks(each).mean() for each in (order, truth))
    size = float(np.sqrt((ranks @ ranks) * (true_ranks @ true_ranks)))
    return {
        "r2": 1.0 - float(((truth - mean) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()),
        "spearman": float(ranks @ true_ranks) / size if size > 0 else 0.0,
    }


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
