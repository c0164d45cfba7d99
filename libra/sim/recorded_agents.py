"""Recorded trajectories (`libra.traces.agent_turns`) as traces that workloads are drawn from.

Trajectories of one source and model form a family. If tools were not timed, their seconds are drawn from a distribution
(`tool_seconds`), with a seed, and are not measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from libra.sim.workload import Trace, TurnPlan
from libra.traces.agent_turns import AgentTurn, read_agent_turns
from libra.types import NO_TOOL

REQUIRED = ("task", "turn", "tool", "status", "completion_tokens")


def tool_seconds(rng: np.random.Generator, count: int) -> np.ndarray:
    """Seconds of tool calls of a coding agent: three quarters are file tools (0.04 s), the rest tests and installs (mean 10 s).

    Shaped after what was measured on agentcgroup's runs: median 0.04 s, P90 9.1 s, P99 21 s; their timeouts are left out.
    """
    return np.where(rng.random(count) < 0.75, 0.04, np.minimum(rng.gamma(2.0, 5.0, count), 60.0))


def load_traces(path: Path, *, seed: int = 0) -> list[Trace]:
    """Trajectories of one file, in its order; ConfigError if columns are missing, or a field is not a number or not a
    status."""
    rng = np.random.default_rng([seed, 0x7001])
    return [
        _trace(f"{one.model}/{one.task}" if one.model else one.task, one.source, one.turns, rng)
        for one in read_agent_turns(path, REQUIRED, "simulation.traces")
    ]


def _trace(task: str, source: str, recorded: tuple[AgentTurn, ...], rng: np.random.Generator) -> Trace:
    prompts = [turn.prompt_tokens or 0 for turn in recorded]
    new = [max(1, turn.completion_tokens) for turn in recorded]
    drawn = tool_seconds(rng, len(recorded))
    turns = []
    for i, turn in enumerate(recorded):
        last = i + 1 == len(recorded)
        payload = prompts[i + 1] - prompts[i] - new[i] if not last and prompts[i] and prompts[i + 1] else 0
        if payload <= 0:
            payload = turn.payload_tokens
        tool_s = float(drawn[i]) if turn.tool_s is None else turn.tool_s
        turns.append(
            TurnPlan(new[i], "", NO_TOOL, 0, 0.0)
            if last  # no turn reads what its tool returned
            else TurnPlan(new[i], turn.tool or "tool", turn.status, payload, tool_s)
        )
    return Trace(task, next((prompt for prompt in prompts if prompt), 1), tuple(turns), source)
