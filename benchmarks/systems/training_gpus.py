"""The trainer of a simulation: GPU-seconds of gradients, computed by as many GPUs as train at the moment. No clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from libra.hardware import GPU, ModelShape
from libra.planner.cost.training_cost import sequences_s
from libra.policy.waves import GroupId
from libra.sim.configured import LAYOUT, PASSES
from libra.sim.workload import Workload


class GroupWork(NamedTuple):
    """GPU-seconds of a group's gradients, and those of its longest sequence, which is never divided."""

    gpu_s: float
    longest_s: float


SampleId = tuple[int, int, int]
"""Iteration, group and sample of a trajectory."""


def sample_seconds(workload: Workload, gpu: GPU, model: ModelShape) -> Mapping[SampleId, float]:
    """GPU-seconds of each trajectory's gradients, by the cost model of `libra.planner.cost`."""
    plans = workload.trajectories
    lengths = np.array([float(plan.final_tokens) for plan in plans])
    each_s = PASSES * sequences_s(gpu, model, lengths, LAYOUT)
    return {plan[:3]: seconds for plan, seconds in zip(plans, each_s.tolist(), strict=True)}


def group_work(sample_s: Mapping[SampleId, float]) -> Mapping[GroupId, GroupWork]:
    """The work of each group whose samples are all trained on."""
    found: dict[GroupId, GroupWork] = {}
    for (iteration, group, _), seconds in sample_s.items():
        so_far = found.get((iteration, group), GroupWork(0.0, 0.0))
        found[iteration, group] = GroupWork(so_far.gpu_s + seconds, max(so_far.longest_s, seconds))
    return found


@dataclass(slots=True)
class TrainingGpus:
    """Work that is left, as a fluid that ``gpus`` GPUs drain evenly.

    Attributes
    ----------
    gpus : int
        GPUs that train now.
    backlog_gpu_s : float
        Work that was added and is not done, as of ``now_s``.
    not_before_s : float
        When the longest sequence that was added can be done at the earliest.
    busy_gpu_s : float
        Work done.
    """

    gpus: int
    backlog_gpu_s: float = 0.0
    not_before_s: float = 0.0
    busy_gpu_s: float = 0.0
    now_s: float = 0.0

    def add(self, now_s: float, work: GroupWork) -> None:
        """More work."""
        self.advance(now_s)
        self.backlog_gpu_s += work.gpu_s
        self.not_before_s = max(self.not_before_s, now_s + work.longest_s)

    def change(self, now_s: float, more_gpus: int) -> None:
        """More GPUs, or fewer."""
        self.advance(now_s)
        self.gpus += more_gpus

    def advance(self, now_s: float) -> None:
        """Work until ``now_s``."""
        done = min(self.backlog_gpu_s, (now_s - self.now_s) * self.gpus)
        self.backlog_gpu_s -= done
        if self.backlog_gpu_s < 1e-9 * (self.busy_gpu_s + 1.0):
            self.backlog_gpu_s = 0.0
        self.busy_gpu_s += done
        self.now_s = now_s

    def busy_gpu_s_at(self, now_s: float) -> float:
        """Work done at a time since `advance`; it changes nothing."""
        return self.busy_gpu_s + min(self.backlog_gpu_s, (now_s - self.now_s) * self.gpus)

    def over_s(self) -> float | None:
        """When all work is done if nothing changes; None: no GPU trains."""
        if self.backlog_gpu_s and not self.gpus:
            return None
        rest_s = self.backlog_gpu_s / self.gpus if self.backlog_gpu_s else 0.0
        return max(self.now_s + rest_s, self.not_before_s)
