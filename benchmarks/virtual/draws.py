"""Workloads drawn from traces, with lengths in a group as alike as the samples of one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np

from libra.errors import ConfigError
from libra.sim.workload import Trace, TurnPlan, Workload, draw, workload_of_groups

KINSHIP = 0.55
"""Intra-class correlation of the ranks of lengths, as measured on tau-bench's airline trials."""
MAX_CONTEXT_TOKENS = 40_960
"""Longest context, as in the Libra paper (arXiv:2606.03077 v2)."""


def agent_turn_files(data: Path, option: str = "--data") -> list[Path]:
    """Every file of agents' turns of a data directory, by name; ConfigError if there is none."""
    found = sorted((data / "agent_turns").glob("*.csv"))
    if not found:
        raise ConfigError(f"{option} {data}: no file {data / 'agent_turns'}/*.csv; give a directory that has one")
    return found


def cut(trace: Trace) -> Trace:
    """The trace up to the turn whose end would pass `MAX_CONTEXT_TOKENS`."""
    context, turns = trace.prompt_tokens, list[TurnPlan]()
    for turn in trace.turns:
        if turns and context + turn.new_tokens > MAX_CONTEXT_TOKENS:
            break
        turns.append(turn)
        context += turn.new_tokens + turn.payload_tokens
    turns[-1] = turns[-1]._replace(tool="", status="", payload_tokens=0, tool_s=0.0)
    return trace._replace(turns=tuple(turns))


def draw_alike(
    traces: Sequence[Trace], *, num_groups: int, group_size: int, seed: int, iterations: int = 1, kinship: float = 0.0
) -> Workload:
    """Like `libra.sim.workload.draw`, but ranks of lengths within a group correlate by ``kinship``
    where no task was recorded ``group_size`` times: a construction, not a recording."""
    tasks = [trace.task for trace in traces]
    of_one_task = group_size > 1 and max(map(tasks.count, set(tasks)), default=0) >= group_size
    if not kinship or of_one_task:
        return draw(traces, num_groups=num_groups, group_size=group_size, seed=seed, iterations=iterations)
    groups = _of_like_lengths(traces, group_size, kinship, np.random.default_rng([seed, 0x5EED]))
    return workload_of_groups(groups, num_groups=num_groups, iterations=iterations, name="sim")


def _of_like_lengths(
    traces: Sequence[Trace], group_size: int, kinship: float, rng: np.random.Generator
) -> Iterator[list[Trace]]:
    ranked = sorted(traces, key=lambda trace: sum(turn.new_tokens for turn in trace.turns))
    while True:
        shared, own = rng.standard_normal(), rng.standard_normal(group_size)
        ranks = [NormalDist().cdf(x) for x in sqrt(kinship) * shared + sqrt(1.0 - kinship) * own]
        yield [ranked[int(rank * len(ranked))] for rank in ranks]
