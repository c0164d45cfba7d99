"""Trajectories as a cost model needs them: how many tokens are computed, how many generated, how long tools take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Totals of n trajectories, one entry each.

    Attributes
    ----------
    prompt_tokens : (n,) array
        Before the first turn.
    generated_tokens : (n,) array
        Sampled by the model, over all turns.
    observation_tokens : (n,) array
        What tools added to the context, over all turns.
    num_turns : (n,) array
        Generations; at least 1.
    tool_wait_s : (n,) array
        Seconds the trajectory waits for tools in all.
    """

    prompt_tokens: Array
    generated_tokens: Array
    observation_tokens: Array
    num_turns: Array
    tool_wait_s: Array

    def __post_init__(self) -> None:
        shape = self.prompt_tokens.shape
        for name in ("prompt_tokens", "generated_tokens", "observation_tokens", "num_turns", "tool_wait_s"):
            values = getattr(self, name)
            least = 1 if name == "num_turns" else 0
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
        """(n,) context of a generated token on average, the context growing evenly from prompt to end."""
        return (self.prompt_tokens + self.final_context_tokens) / 2.0

    @classmethod
    def of(
        cls,
        prompt_tokens: ArrayLike,
        generated_tokens: ArrayLike,
        *,
        observation_tokens: ArrayLike | None = None,
        final_context_tokens: ArrayLike | None = None,
        num_turns: ArrayLike = 1,
        tool_wait_s: ArrayLike = 0.0,
    ) -> Workload:
        """Totals from whatever is known; scalars broadcast.

        ``final_context_tokens`` gives what tools added where ``observation_tokens`` is not given.
        """
        prompt, generated = np.asarray(prompt_tokens, float), np.asarray(generated_tokens, float)
        if observation_tokens is not None:
            observed = np.asarray(observation_tokens, float)
        elif final_context_tokens is not None:
            observed = np.asarray(final_context_tokens, float) - prompt - generated
        else:
            observed = np.zeros(())
        columns = (prompt, generated, observed, np.asarray(num_turns, float), np.asarray(tool_wait_s, float))
        size = np.broadcast_shapes((1,), *(column.shape for column in columns))
        return cls(*(np.broadcast_to(column, size).copy() for column in columns))

    @classmethod
    def from_turns(
        cls,
        prompt_tokens: Sequence[float],
        generated_tokens: Sequence[Sequence[float]],
        observation_tokens: Sequence[Sequence[float]],
        tool_wait_s: Sequence[Sequence[float]],
    ) -> Workload:
        """Totals from per-turn lists, one list per trajectory."""
        return cls(
            np.asarray(prompt_tokens, float),
            np.asarray([sum(turns) for turns in generated_tokens], float),
            np.asarray([sum(turns) for turns in observation_tokens], float),
            np.asarray([max(1, len(turns)) for turns in generated_tokens], float),
            np.asarray([sum(turns) for turns in tool_wait_s], float),
        )
