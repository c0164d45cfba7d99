"""What GPUs do, second by second: work, and idle time by its cause. Pure: the simulation says what holds from now on.

Invariant: after `GpuSeconds.until`, all seconds together are the integral of the GPUs that were named, nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """Where GPU-seconds go. The first two are work that a step is made of; all others are none."""

    GENERATING = "generating"
    """Tokens, and the contexts that they need for the first time, of trajectories that are trained on or still open."""
    TRAINING = "training"
    """Gradients."""
    THROWN_AWAY = "thrown away"
    """Tokens, and contexts for the first time, of trajectories that are not trained on."""
    AGAIN = "computed again"
    """Contexts that were computed before: after preemption or eviction, on another engine, or with new weights; and waiting for
    their KV from host memory with nothing else to run."""
    TOOLS = "tools"
    """An engine all of whose trajectories wait for tools."""
    STEP = "step"
    """An engine while no trajectory is open anywhere, because the next may only begin after the step."""
    UPDATE = "update"
    """The optimizer and the way of the new weights to the engines: trainers; engines that load, or have nothing to do but wait."""
    ROLES = "change of role"
    """Changes between generating and training."""
    NO_WORK = "no work"
    """An engine without trajectories while others have some; trainers without a complete group, or with the last one's longest
    sequence on other GPUs."""


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
        """From now on so many GPUs have each cause."""
        self._gpus = dict(gpus)

    def move(self, gpu_s: float, source: Cause, to: Cause) -> None:
        """A part of what was counted under one cause has another one."""
        self.total[source] -= gpu_s
        self.total[to] += gpu_s
