"""The planning problem in numbers: trajectory costs per kind of engine, and the trainer's step.

A planned step is one batch, generated and trained on once. An engine of kind k with the set S of
trajectories finishes after ``max(sum of load_s[k, S], max of alone_s[k, S])`` seconds: loads add
up, and no trajectory beats its own chain of generations and tool calls. The rollout ends with the
last engine.

  eta >= 1   steps overlap:     step = max(rollout, training) + update  (Libra, arXiv:2606.03077 v2)
  eta == 0   one after another: step = rollout + training + update

At eta >= 1, a single training worker publishes during its next step, before that step changes
weights (`libra.worker.training.publications`). Only the part of the update that exceeds the next
step's training then counts, and engines wait for the part outside it. At most ``eta + 1`` batches
are in progress: step >= (rollout + training + update) / (eta + 1).

1. Every array is float64 or int64, read-only, and finite except ``inf`` for a kind that cannot run
   a trajectory.
2. TP degrees divide one another and the node size, so engines fit into nodes whenever their GPUs
   fit in number (`libra.planner.engine_packing` places them).
3. `GpuSeconds` bounds rollout on any number of GPUs, without binning. With rollout in T seconds,
   trajectory i ran on a kind k with ``least_s[k, i] <= T`` and took ``tp[k] load_s[k, i]``
   GPU-seconds; so F T >= W(T) = sum over i of min over those k of tp[k] load_s[k, i], a falling
   step function. The smallest T with W(T) <= F T is the linear relaxation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class EngineClass(NamedTuple):
    """An engine of ``tp`` GPUs that generates at most ``concurrency`` trajectories at once."""

    tp: int
    concurrency: int

    def __str__(self) -> str:
        return f"TP{self.tp} x {self.concurrency}"


@dataclass(frozen=True, eq=False)
class Problem:
    """K kinds of engines, N trajectories to place, and the trainer's step on M numbers of GPUs."""

    num_gpus: int
    gpus_per_node: int  # the last node may be smaller
    kinds: tuple[EngineClass, ...]
    load_s: Floats  # (K, N) engine-seconds on a full engine, which add up; inf: does not fit
    alone_s: Floats  # (K, N) least seconds from first token to last tool return
    train_gpus: Ints  # (M,) numbers of GPUs on which training can run, ascending
    train_s: Floats  # (M,) seconds of the optimizer step
    eta: int = 1  # staleness bound; 0 is synchronous
    update_s: float = 0.0  # from the end of a step until engines serve its weights; both pools wait
    beside_s: float = 0.0  # part of ``update_s`` that overlaps the next step if one GPU trains and eta >= 1
    fixed_train_gpus: int | None = None
    fixed_engines: Mapping[int, int] = field(default_factory=dict)  # exact count by TP degree; others are free

    def __post_init__(self) -> None:
        for name in ("load_s", "alone_s", "train_gpus", "train_s"):
            array = np.array(getattr(self, name), dtype=np.int64 if name == "train_gpus" else np.float64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "kinds", tuple(EngineClass(*kind) for kind in self.kinds))
        _check_degrees(self)

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the batch, N."""
        return int(self.load_s.shape[1])

    @cached_property
    def tp(self) -> Ints:
        """GPUs of an engine of each kind, (K,)."""
        return np.array([kind.tp for kind in self.kinds], dtype=np.int64)

    @cached_property
    def least_s(self) -> Floats:
        """(K, N) least seconds of an engine of kind k with trajectory i: the larger of load and alone."""
        return np.maximum(self.load_s, self.alone_s)

    @cached_property
    def rollout_digest(self) -> str:
        """Digest of all inputs of rollout: problems with equal digests share rollout layouts."""
        digest = hashlib.sha256(repr((self.kinds, sorted(self.fixed_engines.items()))).encode())
        digest.update(self.load_s.tobytes())
        digest.update(self.alone_s.tobytes())
        return digest.hexdigest()

    def beside(self, train_gpus: Ints | int) -> Floats:
        """Seconds of an update that overlap the next step, with these GPUs in training."""
        alone = self.eta > 0 and self.beside_s > 0.0
        return np.where(np.asarray(train_gpus) == 1, self.beside_s if alone else 0.0, 0.0)

    def step_s(self, train_gpus: Ints | int, train_s: Floats | float, rollout_s: Floats | float) -> Floats:
        """Step seconds from training and rollout seconds; numbers, or arrays of one shape."""
        if not self.eta:
            return np.asarray(np.add(rollout_s, train_s) + self.update_s)
        beside_s = self.beside(train_gpus)
        trainer_s = self.update_s + np.maximum(np.subtract(train_s, beside_s), 0.0)
        engines_s = np.add(rollout_s, self.update_s - beside_s)
        chain_s = (np.add(rollout_s, train_s) + self.update_s) / (self.eta + 1)
        return np.asarray(np.maximum(np.maximum(trainer_s, engines_s), chain_s))

    def enough_s(self, train_gpus: int, train_s: float) -> float:
        """Rollout seconds below which the step gets no shorter."""
        if not self.eta:
            return 0.0
        beside_s = float(self.beside(train_gpus))
        trainer_s = self.update_s + max(train_s - beside_s, 0.0)
        return max(0.0, min(max(train_s, beside_s), (self.eta + 1) * trainer_s - train_s - self.update_s))

    def most_s(self, train_gpus: int, train_s: float, step_s: float) -> float:
        """Rollout seconds from which a step takes at least ``step_s``."""
        if not self.eta:
            return step_s - self.update_s - train_s
        engines_s = step_s - self.update_s + float(self.beside(train_gpus))
        return min(engines_s, (self.eta + 1) * step_s - train_s - self.update_s)

    def having(self, **changes: Any) -> Self:
        """The same problem with some fields replaced."""
        return replace(self, **changes)


def _check_degrees(problem: Problem) -> None:
    degrees, node = sorted(set(problem.tp.tolist())), problem.gpus_per_node
    for small, large in pairwise(sorted({*degrees, node})):
        if large % small or large > node:
            raise PlanError(
                f"TP degrees {degrees} on nodes of {node} GPUs: {small} and {large} do not nest, or an engine spans nodes; type "
                f"degrees out of {[d for d in range(1, node + 1) if node % d == 0]} each of which divides the next"
            )
    if unknown := sorted(set(problem.fixed_engines) - set(degrees)):
        raise PlanError(
            f"planner.fixed_engines: TP {', '.join(map(str, unknown))} is not a degree that can be planned here; type one of "
            f"{', '.join(map(str, degrees))}"
        )


def splits_of(problem: Problem) -> Ints:
    """Ascending indices into ``Problem.train_gpus`` of the possible splits.

    PlanError if there is none; the message names the constraint to relax, and by how much.
    """
    takes = np.isfinite(problem.least_s)
    smallest = int(np.where(takes, problem.tp[:, None], problem.gpus_per_node).min(axis=0).max())
    fixed_gpus = sum(degree * number for degree, number in problem.fixed_engines.items())
    needed = max(smallest, fixed_gpus)
    why_needed = {
        fixed_gpus: f"planner.fixed_engines={dict(problem.fixed_engines)} takes {fixed_gpus} GPUs",
        smallest: f"the smallest engine that holds the longest trajectory takes {smallest} GPUs",
    }[needed]
    runs = np.isfinite(problem.train_s)
    if problem.num_gpus < 2:
        raise PlanError(
            f"planner.num_gpus: {problem.num_gpus} GPU cannot be divided between training and rollout, which take at least one "
            "each; type planner.num_gpus=2"
        )
    if not runs.any():
        raise PlanError(
            f"training runs on no number of GPUs up to {problem.num_gpus}: its memory does not fit; plan for more GPUs "
            "(planner.num_gpus), or type trainer.gradient_checkpointing=true, trainer.layout=fsdp2 or a smaller "
            "trainer.micro_batch_tokens"
        )
    least_train = int(problem.train_gpus[runs].min())
    if least_train + needed > problem.num_gpus:
        raise PlanError(
            f"planner.num_gpus: got {problem.num_gpus}; training needs at least {least_train}, and {why_needed}; type "
            f"planner.num_gpus={least_train + needed}"
        )
    counts, pinned = problem.train_gpus[runs].tolist(), problem.fixed_train_gpus
    fit = problem.train_gpus <= problem.num_gpus - needed
    if pinned is None:
        return np.flatnonzero(runs & fit)
    if pinned not in counts:
        near = min(counts, key=lambda count: abs(count - pinned))
        shown = ", ".join(map(str, counts)) if len(counts) <= 8 else f"{counts[0]}, {counts[1]}, ..., {counts[-1]}"
        raise PlanError(
            f"planner.fixed_train_gpus: training does not run on {pinned} GPUs (memory, or groups that do not divide); it runs on "
            f"{shown}; type planner.fixed_train_gpus={near}"
        )
    if pinned + needed > problem.num_gpus:
        raise PlanError(
            f"planner.fixed_train_gpus: {pinned} of {problem.num_gpus} GPUs leave {problem.num_gpus - pinned} for rollout, but "
            f"{why_needed}; type planner.fixed_train_gpus={problem.train_gpus[runs & fit].max()}, or "
            f"planner.num_gpus={pinned + needed}"
        )
    return np.flatnonzero(problem.train_gpus == pinned)


@dataclass(frozen=True, slots=True)
class GpuSeconds:
    """W as steps: from ``at_s[j]`` until the next, at least ``gpu_s[j]`` GPU-seconds are needed.

    Before ``at_s[0]``, the least time of the longest trajectory on its fastest kind, no number of
    GPUs suffices.
    """

    at_s: Floats
    gpu_s: Floats

    def lower_s(self, num_gpus: Ints) -> Floats:
        """Lower bound on rollout seconds for each of ``num_gpus``, of that shape; ``inf`` for 0 GPUs."""
        enough = self.gpu_s / np.maximum(self.at_s, 1e-300)  # GPUs that finish W(at_s) in time; falls with j
        first = np.searchsorted(-enough, -np.asarray(num_gpus, dtype=np.float64), side="left")
        before = self.gpu_s[np.maximum(first - 1, 0)] / np.maximum(num_gpus, 1e-300)
        at = np.where(first < len(self.at_s), self.at_s[np.minimum(first, len(self.at_s) - 1)], np.inf)
        bound = np.where(first == 0, self.at_s[0], np.minimum(at, before))
        return np.where(np.asarray(num_gpus) > 0, bound, np.inf)

    def at(self, time_s: float) -> float:
        """W at ``time_s``, in GPU-seconds."""
        step = int(np.searchsorted(self.at_s, time_s, side="right")) - 1
        return float(self.gpu_s[step]) if step >= 0 else float("inf")


def gpu_seconds(problem: Problem) -> GpuSeconds:
    """W of a problem; PlanError if a trajectory fits no kind of engine."""
    least_s = problem.least_s
    order = np.argsort(least_s, axis=0, kind="stable")
    at_s = np.take_along_axis(least_s, order, axis=0)
    if not np.isfinite(at_s[0]).all():
        lost = np.flatnonzero(~np.isfinite(at_s[0]))
        raise PlanError(
            f"{len(lost)} of {problem.num_trajectories} trajectories (the first is number {lost[0]}) fit no kind of engine of "
            f"{', '.join(map(str, problem.kinds))}: their context is larger than the KV memory; allow a higher TP degree "
            "(planner.tp), or lower rollout.max_context_tokens"
        )
    with np.errstate(invalid="ignore"):
        gpu_s = np.minimum.accumulate(np.take_along_axis(problem.tp[:, None] * problem.load_s, order, axis=0), axis=0)
    start_s = float(at_s[0].max())
    open_at_start = (at_s <= start_s).sum(axis=0) - 1
    start_gpu_s = float(np.take_along_axis(gpu_s, open_at_start[None], axis=0).sum())
    falls = gpu_s[:-1] - gpu_s[1:]
    later = (at_s[1:] > start_s) & (falls > 0)
    when, fall = at_s[1:][later], falls[later]
    sort = np.argsort(when, kind="stable")
    return GpuSeconds(
        np.concatenate([[start_s], when[sort]]), start_gpu_s - np.concatenate([[0.0], np.cumsum(fall[sort])])
    )
