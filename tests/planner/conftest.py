"""Problems small enough to be solved by trying everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from libra.planner.planning_problem import Problem


def _random_problem(seed: int) -> Problem:
    """At most 12 GPUs and 6 trajectories; kinds that do and do not pay, long tails, holes, both step models."""
    rng = np.random.default_rng(seed)
    num_gpus, num_trajectories, node = int(rng.integers(3, 13)), int(rng.integers(1, 7)), int(rng.choice([4, 8]))
    degrees = [tp for tp in (1, 2, 4, 8)[: int(rng.integers(1, 5))] if tp <= node]
    kinds = [(tp, c) for tp in degrees for c in ((4, 16) if rng.random() < 0.3 else (8,))]
    size = rng.lognormal(0.0, 1.0, num_trajectories)
    load_s = np.stack(
        [size * rng.uniform(0.7, 1.3, num_trajectories) * tp ** -rng.uniform(0.3, 1.3) for tp, _ in kinds]
    )
    alone_s = np.stack(
        [size * rng.uniform(0.5, 2.0, num_trajectories) * tp ** -rng.uniform(0.0, 0.8) for tp, _ in kinds]
    )
    if len(kinds) > 1 and num_gpus > 4 and rng.random() < 0.3:
        load_s[0, size.argmax()] = np.inf
    train_gpus = np.arange(1, num_gpus)
    train_s = rng.uniform(0.03, 0.8) * size.sum() / train_gpus ** rng.uniform(0.6, 1.0)
    if len(train_gpus) > 2 and rng.random() < 0.3:
        train_s[0] = np.inf
    eta = int(rng.integers(0, 2))
    update_s = float(rng.uniform(0.05, 0.5)) * size.sum()
    beside_s = update_s * float(rng.choice([0.0, 0.6, 1.0]))
    return Problem(
        num_gpus, node, kinds, load_s, alone_s, train_gpus, train_s, eta=eta, update_s=update_s, beside_s=beside_s
    )


def _step_s(problem: Problem, train_gpus: int, train_s: float, rollout_s: float) -> float:
    """Seconds from one step to the next where nothing else is known than who waits for whom."""
    update_s, beside_s = problem.update_s, problem.beside_s
    if not problem.eta:
        return train_s + rollout_s + update_s
    if train_gpus > 1 or not beside_s:
        return max(train_s, rollout_s) + update_s
    trains_s = max(train_s, beside_s) + update_s - beside_s  # passes beside a publication, and what comes after both
    return max(trains_s, rollout_s + update_s - beside_s, (train_s + rollout_s + update_s) / (problem.eta + 1))


def _best_by_trying(problem: Problem) -> float:
    """The shortest step over all splits, engines and assignments of whole trajectories: every subset on every kind, in turn."""
    num, kinds = problem.num_trajectories, range(len(problem.kinds))
    everything = (1 << num) - 1
    takes = {}
    for subset in range(1, everything + 1):
        items = [i for i in range(num) if subset >> i & 1]
        for k in kinds:
            takes[k, subset] = max(problem.load_s[k, items].sum(), problem.alone_s[k, items].max())
    best = [[float("inf")] * (everything + 1) for _ in range(problem.num_gpus + 1)]
    for gpus in range(problem.num_gpus + 1):
        best[gpus][0] = 0.0
        for subset in range(1, everything + 1) if gpus else ():
            first = subset & -subset
            rest = others = subset ^ first
            while True:  # the engine that has the first trajectory, with every choice of company
                for k in kinds:
                    if problem.kinds[k].tp <= gpus:
                        after = best[gpus - problem.kinds[k].tp][subset ^ others ^ first]
                        best[gpus][subset] = min(best[gpus][subset], max(takes[k, others | first], after))
                if not others:
                    break
                others = (others - 1) & rest
    steps = []
    for gpus, train_s in zip(problem.train_gpus.tolist(), problem.train_s.tolist(), strict=True):
        rollout_s = best[problem.num_gpus - gpus][everything]
        steps.append(_step_s(problem, gpus, train_s, rollout_s))
    return min(steps)


@pytest.fixture(scope="session")
def random_problem() -> Callable[[int], Problem]:
    """`_random_problem`: a small problem by seed."""
    return _random_problem


@pytest.fixture(scope="session")
def step_s() -> Callable[[Problem, int, float, float], float]:
    """`_step_s`: seconds of a step of a problem from training GPUs, training and rollout."""
    return _step_s


@pytest.fixture(scope="session")
def best_by_trying() -> Callable[[Problem], float]:
    """`_best_by_trying`: the true optimum of a small problem."""
    return _best_by_trying
