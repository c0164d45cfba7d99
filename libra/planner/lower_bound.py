"""A proven lower bound of the rollout's seconds for every number of GPUs at once, without binning trajectories.

If the rollout is done after T seconds, trajectory i ran on a kind k with ``least_s[k, i] <= T``, and took ``tp[k] load_s[k, i]``
GPU-seconds there. So the GPU-seconds F T of F GPUs are at least

    W(T) = sum over i of min over k with least_s[k, i] <= T of tp[k] load_s[k, i],

a falling step function. The smallest T with W(T) <= F T is the bound: it is the linear relaxation over layouts and
assignments, solved in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libra.errors import PlanError
from libra.planner.planning_problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True)
class GpuSeconds:
    """W as steps: from ``at_s[j]`` on (until the next), at least ``gpu_s[j]`` GPU-seconds are needed. Before ``at_s[0]`` no
    number is enough.

    ``at_s[0]`` is the longest trajectory's least time on its fastest kind: no number of GPUs is faster.
    """

    at_s: Floats
    gpu_s: Floats

    def lower_s(self, num_gpus: Ints) -> Floats:
        """Lower bound of the rollout's seconds on each of ``num_gpus`` GPUs, any shape; ``inf`` on none."""
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
    """W of a problem.

    Raises
    ------
    PlanError
        A trajectory fits no kind of engine.
    """
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
