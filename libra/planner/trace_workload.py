"""Workloads from traces of agents, and cut or drawn to the size of a batch. Files are read by the caller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra.errors import PlanError
from libra.planner.cost import Workload
from libra.traces.agent_turns import Recorded

COLUMNS = ("task", "sample", "turn", "prompt_tokens", "completion_tokens")
"""Columns a trace must have, for `libra.traces.agent_turns`; ``tool_s`` is used where it is there."""


def workload_of_turns(recorded: Sequence[Recorded], tool_s: float) -> Workload:
    """One trajectory for each that was recorded.

    Parameters
    ----------
    recorded : sequence of Recorded
        Turns with their ``prompt_tokens``.
    tool_s : float
        Seconds of a tool call where the trace does not say.

    Raises
    ------
    PlanError
        There is none, or a turn does not say its context.
    """
    if not recorded:
        raise PlanError("planner.trace: the file has no row; a trace has one row per turn")
    columns = []
    for one in recorded:
        contexts = [turn.prompt_tokens for turn in one.turns]
        if None in contexts:
            raise PlanError(
                f"planner.trace: task {one.task!r}, sample {one.sample!r}: turn {contexts.index(None)} has no prompt_tokens; "
                "the planner needs the context before each turn"
            )
        first, last = contexts[0] or 0, contexts[-1] or 0
        generated = [turn.completion_tokens for turn in one.turns]
        waits = [tool_s if turn.tool_s is None else turn.tool_s for turn in one.turns]
        seen = last - first - sum(generated[:-1])
        columns.append((first, sum(generated), max(seen, 0.0), len(one.turns), sum(waits)))
    return Workload(*np.array(columns, dtype=np.float64).T.copy())


def drawn(workload: Workload, num_trajectories: int, seed: int, max_context_tokens: int | None = None) -> Workload:
    """A batch of ``num_trajectories`` drawn with replacement, each cut where its context reaches ``max_context_tokens``."""
    pick = np.random.default_rng(seed).integers(0, len(workload), num_trajectories)
    prompt, generated, observed = (
        getattr(workload, name)[pick] for name in ("prompt_tokens", "generated_tokens", "observation_tokens")
    )
    share = np.ones(num_trajectories)
    if max_context_tokens is not None:
        prompt = np.minimum(prompt, max_context_tokens - 1)
        share = np.minimum(1.0, (max_context_tokens - prompt) / np.maximum(generated + observed, 1.0))
    return Workload(
        prompt,
        generated * share,
        observed * share,
        np.maximum(1.0, np.round(workload.num_turns[pick] * share)),
        workload.tool_wait_s[pick] * share,
    )
