"""Where the GPU-seconds of runs in virtual time go, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from libra.facts import Turn


class Cause(StrEnum):
    """Where GPU-seconds go. The first two are work that a step is made of; all others are none."""

    GENERATING = "generating"
    """Tokens and first contexts of trajectories that are trained on or still open."""
    TRAINING = "training"
    """Gradients."""
    AGAIN = "computed again"
    """Recomputed contexts (preemption, eviction, another engine), and waits for their KV."""
    TOOLS = "tools"
    """An engine all of whose trajectories wait for tools."""
    STEP = "step"
    """An engine while no trajectory is open, because the next may only start after the step."""
    UPDATE = "update"
    """Optimizer and publication: trainers, and engines that load or only wait."""
    ROLES = "change of role"
    """Changes between generating and training."""
    NO_WORK = "no work"
    """An engine without trajectories while others have some; a trainer without a complete group."""


WORK = (Cause.GENERATING, Cause.TRAINING)


class GpuSeconds:
    """GPU-seconds by cause, of GPUs each of which has one cause at a time."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(Cause, 0.0)
        self._gpus: dict[Cause, int] = {}
        self._now_s = 0.0

    def until(self, now_s: float) -> float:
        """Count up to a time with the causes that held; returns the seconds since the last call."""
        seconds, self._now_s = now_s - self._now_s, now_s
        if seconds:
            for cause, gpus in self._gpus.items():
                self.total[cause] += seconds * gpus
        return seconds

    def holds(self, gpus: Mapping[Cause, int]) -> None:
        self._gpus = dict(gpus)

    def move(self, gpu_s: float, source: Cause, to: Cause) -> None:
        self.total[source] -= gpu_s
        self.total[to] += gpu_s


class PipelineResult(NamedTuple):
    """Result of a pipeline."""

    published_s: tuple[float, ...]
    gpu_s: Mapping[Cause, float]
    turns: tuple[Turn, ...]
    lags: tuple[int, ...]
    gave_up: bool = False

    def step_s(self, after: int = 1) -> float:
        if self.gave_up:
            return math.inf
        begin = self.published_s[after - 1] if after else 0.0
        return (self.published_s[-1] - begin) / (len(self.published_s) - after)

    def gpu_frac(self) -> dict[Cause, float]:
        total = sum(self.gpu_s.values())
        return {cause: seconds / total for cause, seconds in self.gpu_s.items()}


WIDTH = 15
SHOWN_FROM = 5e-4
"""A cause has a column if a system spends this share of its GPU-seconds on it."""


class Mean(NamedTuple):
    """Mean over seeds, and half the width of its 95 % interval (0 with one seed)."""

    mean: float
    half: float

    @classmethod
    def of(cls, each: Iterable[float]) -> Mean:
        values = np.array([*each])
        half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(float(values.mean()), float(half))


Shares = Mapping[Cause, Mean]
"""Shares of a system's GPU-seconds."""


def shares_of(results: Sequence[PipelineResult]) -> Shares:
    return {cause: Mean.of(each.gpu_frac()[cause] for each in results) for cause in Cause}


def lines(systems: Mapping[str, Shares]) -> list[str]:
    """A header and a line per system, in percent of its GPUs x seconds, without unused causes."""
    causes = [cause for cause in Cause if any(shares[cause].mean >= SHOWN_FROM for shares in systems.values())]
    found = [f"  {'% of GPUs x seconds':21s}" + "".join(f"{column:>{WIDTH}s}" for column in causes)]
    for system, shares in systems.items():
        cells = [f"{100 * shares[cause].mean:.1f} +- {100 * shares[cause].half:.1f}" for cause in causes]
        found.append(f"  {system:21s}" + "".join(f"{cell:>{WIDTH}s}" for cell in cells))
    return found
