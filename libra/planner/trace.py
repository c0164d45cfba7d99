"""Workloads from traces of agents, one row per turn, and cut or drawn to the size of a batch. Files are read by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from libra.errors import PlanError
from libra.planner.cost import Workload

COLUMNS = ("task", "sample", "turn", "prompt_tokens", "completion_tokens")
"""Columns a trace must have; ``tool_s`` is used where it is there."""


def workload_of_turns(rows: Iterable[Mapping[str, str]], tool_s: float) -> Workload:
    """One trajectory per (task, sample), its turns in their order.

    Parameters
    ----------
    rows : iterable of mapping of str
        As ``csv.DictReader`` gives them: ``prompt_tokens`` is the context before a turn, ``completion_tokens`` what it adds.
    tool_s : float
        Seconds of a tool call where the row has no ``tool_s``.

    Raises
    ------
    PlanError
        A column is missing or no number, or there is no row.
    """
    turns: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            entry = (
                int(row["turn"]),
                float(row["prompt_tokens"]),
                float(row["completion_tokens"]),
                float(row.get("tool_s") or tool_s),
            )
            turns.setdefault((row["task"], row["sample"]), []).append(entry)
        except (KeyError, ValueError, TypeError) as error:
            raise PlanError(
                f"planner.trace, line {number}: {error!r}; a trace has the columns {', '.join(COLUMNS)}, one row per turn"
            ) from error
    if not turns:
        raise PlanError("planner.trace: the file has no row; a trace has one row per turn")
    columns = []
    for entries in turns.values():
        entries.sort()
        _, contexts, generated, waits = zip(*entries, strict=True)
        seen = contexts[-1] - contexts[0] - sum(generated[:-1])
        columns.append((contexts[0], sum(generated), max(seen, 0.0), len(entries), sum(waits)))
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
