"""Options, GPUs of the trainer and streamed batches of a run in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from libra.hardware import GPU, ModelShape
from libra.hardware.engine_tables import HostPool
from libra.planner.cost.training_cost import sequences_s
from libra.policy.admission import CommittedGroup
from libra.policy.tail import TurningRule
from libra.policy.waves import GroupId, first_come
from libra.sim.configured import LAYOUT, PASSES
from libra.sim.workload import Workload


class GroupWork(NamedTuple):
    """GPU-seconds of a group's gradients, and of its longest sequence, which is never divided."""

    gpu_s: float
    longest_s: float


def group_work(workload: Workload, gpu: GPU, model: ModelShape) -> Mapping[GroupId, GroupWork]:
    """The work of each group, all of whose samples are trained on, by `libra.planner.cost`."""
    plans, found = workload.trajectories, dict[GroupId, GroupWork]()
    lengths = np.array([float(plan.final_tokens) for plan in plans])
    each_s = PASSES * sequences_s(gpu, model, lengths, LAYOUT)
    for plan, seconds in zip(plans, each_s.tolist(), strict=True):
        so_far = found.get((plan.iteration, plan.group), GroupWork(0.0, 0.0))
        work = GroupWork(so_far.gpu_s + seconds, max(so_far.longest_s, seconds))
        found[plan.iteration, plan.group] = work
    return found


@dataclass(slots=True)
class TrainingGpus:
    """Work that is left, as a fluid that ``gpus`` GPUs drain evenly."""

    gpus: int  # that train now
    backlog_gpu_s: float = 0.0  # added and not done, as of ``now_s``
    not_before_s: float = 0.0  # when the longest sequence that was added can be done at the earliest
    busy_gpu_s: float = 0.0  # done
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
        """Time at which all work is done if nothing changes; None if no GPU trains."""
        if self.backlog_gpu_s and not self.gpus:
            return None
        rest_s = self.backlog_gpu_s / self.gpus if self.backlog_gpu_s else 0.0
        return max(self.now_s + rest_s, self.not_before_s)


class WavePrices(NamedTuple):
    """Waves of a streamed step as a live trainer adds them (`libra.policy.waves`), with their
    overhead.

    ``alone_s`` and ``shared_s`` are the seconds of commit, start and report of a wave, for which
    its GPUs wait: on core trainers alone, and with switched engines, whose gradients are merged.
    """

    most: int
    least_groups: int = 1
    enough_groups: int = 0
    alone_s: float = 0.0
    shared_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Settings of a pipeline besides workload, engines and discipline."""

    eta: int = 0
    core_gpus: int = 0
    update_s: float = 10.0  # from the last gradient to new weights on the engines
    beside_s: float = 0.0  # of it, beside the next step if a GPU always trains and eta >= 1
    close_s: float = 1.0  # of the optimizer
    merge_s: float = 3.0  # of merging switched GPUs' gradients
    load_s: float = 3.0  # in which an engine stops for new weights
    drain_s: float = 0.0  # in which a switching engine ends its work
    rule: TurningRule = field(default_factory=TurningRule)
    waves: WavePrices | None = None  # None: gradients are a fluid that any GPU can share at any moment
    host: HostPool | None = None  # KV in host memory
    teacher_token_s: float = 0.0
    num_steps: int | None = None
    gives_up: tuple[int, float] | None = None  # (n, s): stop once the mean step without the first n must exceed s
    causes: bool = True  # False saves time and leaves `PipelineResult.gpu_s` empty


class StreamedBatches:
    """Batches of one run that are filled as groups are committed (`libra.policy.admission`).

    1. Every group is taken once, after its commit; a batch takes exactly ``groups_per_batch``.
    2. With ``own``, batch ``j`` takes the groups of iteration ``j``, whose gate opened at version
       ``j - eta``; else complete groups first, with places for groups at their deadline
       (`libra.policy.waves.first_come`).
    """

    def __init__(self, eta: int, groups_per_batch: int, *, own: bool) -> None:
        self.eta, self.groups_per_batch, self.own = eta, groups_per_batch, own
        self.batch, self.taken = -1, groups_per_batch  # the open batch, and its groups so far
        self._committed: dict[GroupId, int] = {}  # with their deadlines
        self._in_flight: dict[GroupId, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the open batch has all its groups."""
        return self.taken == self.groups_per_batch

    def generation_started(self, iteration: int, group: int, version: int) -> None:
        """The first tokens of a group are being generated by ``version``."""
        self._in_flight.setdefault((iteration, group), version + self.eta)

    def version_published(self, version: int) -> tuple[GroupId, ...]:
        """Open batch ``version``; the groups it takes at once."""
        self.batch, self.taken = version, 0
        return self._take()

    def group_committed(self, done: CommittedGroup) -> tuple[GroupId, ...]:
        """The record of a group is written; returns the groups that the open batch takes now."""
        place = (done.iteration, done.group)
        deadline = self._in_flight.pop(place, done.iteration)
        self._committed[place] = done.oldest_version + self.eta if done.oldest_version >= 0 else deadline
        return self._take()

    def _take(self) -> tuple[GroupId, ...]:
        places, committed = self.groups_per_batch - self.taken, self._committed
        if self.own:
            found = sorted(place for place in committed if place[0] == self.batch)
        else:
            found = first_come(self.batch, places, self.groups_per_batch, self.eta, committed, self._in_flight.values())
        for place in found:
            del committed[place]
        self.taken += len(found)
        return tuple(found)
