"""The splits that satisfy the pools and the fixed parts; if none does, the error names the constraint that excludes the
last one."""

from __future__ import annotations

import numpy as np

from libra.errors import PlanError
from libra.planner.planning_problem import Ints, Problem


def splits_of(problem: Problem) -> Ints:
    """Indices into ``Problem.train_gpus`` of the splits that may be chosen, ascending.

    Raises
    ------
    PlanError
        None may; the message names the constraint to relax, and by how much.
    """
    takes = np.isfinite(problem.least_s)
    smallest = int(np.where(takes, problem.tp[:, None], problem.gpus_per_node).min(axis=0).max())
    fixed_gpus = sum(degree * number for degree, number in problem.fixed_engines.items())
    needed = max(problem.min_rollout_gpus, smallest, fixed_gpus)
    why_needed = {
        fixed_gpus: f"planner.fixed_engines={dict(problem.fixed_engines)} takes {fixed_gpus} GPUs",
        smallest: f"the smallest engine that holds the longest trajectory takes {smallest} GPUs",
        problem.min_rollout_gpus: f"planner.min_rollout_gpus={problem.min_rollout_gpus}",
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
    pinned = problem.fixed_train_gpus
    if pinned is not None:
        return _pinned(problem, pinned, needed, why_needed)
    chosen = runs & (problem.train_gpus >= problem.min_train_gpus) & (problem.train_gpus <= problem.num_gpus - needed)
    if not chosen.any():
        counts = problem.train_gpus[runs].tolist()
        raise PlanError(
            f"planner.min_train_gpus: got {problem.min_train_gpus}, and {why_needed}, out of {problem.num_gpus} GPUs; training "
            f"runs on {_some(counts)} GPUs; type planner.min_train_gpus={least_train}, or planner.min_rollout_gpus={smallest}"
        )
    return np.flatnonzero(chosen)


def _pinned(problem: Problem, pinned: int, needed: int, why_needed: str) -> Ints:
    at = np.flatnonzero((problem.train_gpus == pinned) & np.isfinite(problem.train_s))
    counts = problem.train_gpus[np.isfinite(problem.train_s)].tolist()
    if not len(at):
        near = min(counts, key=lambda count: abs(count - pinned))
        raise PlanError(
            f"planner.fixed_train_gpus: training does not run on {pinned} GPUs (memory, or groups that do not divide); it runs on "
            f"{_some(counts)}; type planner.fixed_train_gpus={near}"
        )
    if pinned + needed > problem.num_gpus:
        fit = [count for count in counts if count + needed <= problem.num_gpus]
        raise PlanError(
            f"planner.fixed_train_gpus: {pinned} of {problem.num_gpus} GPUs leave {problem.num_gpus - pinned} for rollout, but "
            f"{why_needed}; type planner.fixed_train_gpus={max(fit)}, or planner.num_gpus={pinned + needed}"
        )
    return at


def _some(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= 8 else f"{counts[0]}, {counts[1]}, ..., {counts[-1]}"
