"""Totals of trajectories as a cost model needs them: tokens computed, tokens generated, seconds of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError, PlanError
from libra.traces.agent_turns import Recorded

Array = NDArray[np.float64]

TRACE_COLUMNS = ("task", "sample", "turn", "prompt_tokens", "completion_tokens")
"""Columns that `totals_of_trace` needs of a file of agents' turns; it uses ``tool_s`` if the file has it."""


@dataclass(frozen=True, slots=True)
class TrajectoryTotals:
    """Totals of n trajectories, one entry each.

    Attributes
    ----------
    prompt_tokens : (n,) array
        Before the first turn.
    generated_tokens : (n,) array
        Sampled by the model, over all turns.
    observation_tokens : (n,) array
        Added to the context by tools, over all turns.
    num_turns : (n,) array
        Generations; at least 1.
    tool_wait_s : (n,) array
        Seconds of all tool calls together.
    """

    prompt_tokens: Array
    generated_tokens: Array
    observation_tokens: Array
    num_turns: Array
    tool_wait_s: Array

    def __post_init__(self) -> None:
        shape = self.prompt_tokens.shape
        for name in (field.name for field in fields(self)):
            values, least = getattr(self, name), 1 if name == "num_turns" else 0
            if values.shape != shape or values.ndim != 1 or not len(values):
                raise ConfigError(
                    f"workload.{name}: got shape {values.shape}; allowed is one number per trajectory, {shape}"
                )
            if not (np.all(np.isfinite(values)) and values.min() >= least):
                raise ConfigError(
                    f"workload.{name}: got {values.min()}; allowed are finite numbers of at least {least}"
                )

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def final_context_tokens(self) -> Array:
        """(n,) tokens in the context when the trajectory ends."""
        return self.prompt_tokens + self.generated_tokens + self.observation_tokens

    @property
    def mean_context_tokens(self) -> Array:
        """(n,) context of a generated token on average; the context grows evenly from prompt to end."""
        return (self.prompt_tokens + self.final_context_tokens) / 2.0

    @classmethod
    def of(
        cls,
        prompt_tokens: ArrayLike,
        generated_tokens: ArrayLike,
        *,
        observation_tokens: ArrayLike = 0.0,
        num_turns: ArrayLike = 1,
        tool_wait_s: ArrayLike = 0.0,
    ) -> TrajectoryTotals:
        """Totals from arrays and scalars, which broadcast."""
        given = (prompt_tokens, generated_tokens, observation_tokens, num_turns, tool_wait_s)
        columns = [np.asarray(values, float) for values in given]
        size = np.broadcast_shapes((1,), *(column.shape for column in columns))
        return cls(*(np.broadcast_to(column, size).copy() for column in columns))

    def resampled(self, num_trajectories: int, seed: int, max_context_tokens: int | None = None) -> TrajectoryTotals:
        """``num_trajectories`` of these, sampled with replacement; each ends when its context reaches
        ``max_context_tokens``."""
        pick = np.random.default_rng(seed).integers(0, len(self), num_trajectories)
        prompt, generated, observed = (
            column[pick] for column in (self.prompt_tokens, self.generated_tokens, self.observation_tokens)
        )
        share = np.ones(num_trajectories)
        if max_context_tokens is not None:
            prompt = np.minimum(prompt, max_context_tokens - 1)
            share = np.minimum(1.0, (max_context_tokens - prompt) / np.maximum(generated + observed, 1.0))
        turns = np.maximum(1.0, np.round(self.num_turns[pick] * share))
        return TrajectoryTotals(prompt, generated * share, observed * share, turns, self.tool_wait_s[pick] * share)


def totals_of_trace(recorded: Sequence[Recorded], tool_s: float) -> TrajectoryTotals:
    """Totals of recorded agents (`libra.traces.agent_turns`), in their order.

    Parameters
    ----------
    recorded : sequence of Recorded
        Turns with their ``prompt_tokens``.
    tool_s : float
        Seconds of a tool call if the trace has none.

    Raises
    ------
    PlanError
        The trace is empty, or a turn lacks its context.
    """
    if not recorded:
        raise PlanError("planner.trace: the file has no row; a trace has one row per turn")
    rows = []
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
        observed = max(last - first - sum(generated[:-1]), 0.0)
        rows.append((first, sum(generated), observed, len(one.turns), sum(waits)))
    return TrajectoryTotals(*np.array(rows, dtype=np.float64).T.copy())
