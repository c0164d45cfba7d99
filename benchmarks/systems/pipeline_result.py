"""The result of a pipeline: when each step was over, where GPU-seconds went, and what it trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.systems.gpu_seconds import Cause
from libra.facts import Turn


class TurnDone(NamedTuple):
    """A change of role that began, and why."""

    at_s: float
    turn: Turn


class PipelineResult(NamedTuple):
    """Result of a pipeline.

    Attributes
    ----------
    published_s : tuple of float
        When each step's weights were published.
    gpu_s : mapping of Cause to float
        GPU-seconds by cause, up to the last publication; empty without `PipelineOptions.causes`.
    turns : tuple of TurnDone
    lags : tuple of int
        Of each group that a batch took, versions between its first token and the batch.
    trained_frac : float
        GPU-seconds of gradients of such a group, over those of a group of the workload: below 1 where long groups or samples are
        thrown away, or come later.
    gave_up : bool
        As `PipelineOptions.gives_up` says; the mean step is infinite then.
    """

    published_s: tuple[float, ...]
    gpu_s: Mapping[Cause, float]
    turns: tuple[TurnDone, ...]
    lags: tuple[int, ...]
    trained_frac: float
    gave_up: bool = False

    def step_s(self, after: int = 1) -> float:
        """Mean seconds of a step, the first ``after`` left out."""
        if self.gave_up:
            return math.inf
        if len(self.published_s) <= after:
            raise ValueError(f"after: got {after} with {len(self.published_s)} steps")
        begin = self.published_s[after - 1] if after else 0.0
        return (self.published_s[-1] - begin) / (len(self.published_s) - after)

    def gpu_frac(self) -> dict[Cause, float]:
        """Shares of all GPU-seconds by cause; they add up to 1."""
        total = sum(self.gpu_s.values())
        return {cause: seconds / total for cause, seconds in self.gpu_s.items()}
