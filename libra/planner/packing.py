"""Whole trajectories on whole engines: a layout that can be run, found without a solver.

Longest first onto the least loaded engine of its kind, then moves and swaps away from the last engine to finish. What this
gives is feasible and never claimed to be optimal: `libra.planner.bound` and the programs say how far off it can be.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from libra.planner.problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Engines, and which trajectory is on which.

    Attributes
    ----------
    kind_of : int array (E,)
        Kind of each engine, an index into ``Problem.kinds``.
    engine_of : int array (N,)
        Engine of each trajectory.
    load_s : float array (E,)
        Sum of the loads on each engine.
    time_s : float
        Seconds until the last engine is done: the largest load, or the longest trajectory alone.
    """

    kind_of: Ints
    engine_of: Ints
    load_s: Floats
    time_s: float

    def counts(self, num_kinds: int) -> Ints:
        """Engines of each kind, (K,)."""
        return np.bincount(self.kind_of, minlength=num_kinds)

    def gpus(self, problem: Problem) -> int:
        """GPUs of all engines together."""
        return int(problem.tp[self.kind_of].sum())


def cheapest_kinds(problem: Problem, within_s: float) -> Ints:
    """Of the kinds that can be done with trajectory i in ``within_s``, the one that takes the fewest GPU-seconds, (N,).

    The smaller engine wins a tie. -1: none can.
    """
    with np.errstate(invalid="ignore"):
        cost = np.where(problem.least_s <= within_s, problem.tp[:, None] * problem.load_s, np.inf)
    best = cost.argmin(axis=0)
    best[~np.isfinite(cost.min(axis=0))] = -1
    return best


def layout_of(problem: Problem, kind_of: Ints, engine_of: Ints) -> Placement:
    """The layout with its loads and its time worked out."""
    kinds = kind_of[engine_of]
    rows = np.arange(problem.num_trajectories)
    load_s = np.bincount(engine_of, weights=problem.load_s[kinds, rows], minlength=len(kind_of))
    longest_s = problem.alone_s[kinds, rows].max()
    return Placement(kind_of, engine_of, load_s, float(max(load_s.max(), longest_s)))


def longest_first(load_s: Floats, num_engines: int) -> tuple[Ints, float]:
    """Engine of each load (n,), and the largest sum, if each goes to the least loaded engine in falling order."""
    engine_of = np.zeros(len(load_s), dtype=np.int64)
    heap = [(0.0, engine) for engine in range(num_engines)]
    for item in np.argsort(-load_s, kind="stable").tolist():
        total, engine = heap[0]
        engine_of[item] = engine
        heapq.heapreplace(heap, (total + float(load_s[item]), engine))
    return engine_of, max(total for total, _ in heap)


def pack(problem: Problem, within_s: float, num_gpus: int) -> Placement | None:
    """A layout done in ``within_s`` on at most ``num_gpus`` GPUs, each trajectory on its cheapest kind; None: not found."""
    kinds = cheapest_kinds(problem, within_s)
    if (kinds < 0).any():
        return None
    kind_of: list[int] = []
    engine_of = np.zeros(problem.num_trajectories, dtype=np.int64)
    used = np.unique(kinds)
    totals = {int(k): problem.load_s[k, kinds == k] for k in used}
    fewest = {k: max(1, int(np.ceil(load.sum() / within_s - 1e-9))) for k, load in totals.items()}
    if sum(number * problem.kinds[k].tp for k, number in fewest.items()) > num_gpus:
        return None
    left = num_gpus - sum(number * problem.kinds[k].tp for k, number in fewest.items())
    for k, load in totals.items():
        number, step = fewest[k], 1
        placed, time_s = longest_first(load, number)
        while time_s > within_s and step * problem.kinds[k].tp <= left:
            number, left, step = number + step, left - step * problem.kinds[k].tp, step * 2
            placed, time_s = longest_first(load, number)
        if time_s > within_s:
            return None
        engine_of[kinds == k] = placed + len(kind_of)
        kind_of += [k] * number
    return layout_of(problem, np.array(kind_of, dtype=np.int64), engine_of)


def spread(problem: Problem, counts: Ints, kinds: Ints) -> Placement:
    """The layout with ``counts`` (K,) engines, and trajectory i on one of kind ``kinds[i]``, of which there must be one."""
    kind_of = np.repeat(np.arange(len(counts)), counts)
    first = np.concatenate([[0], np.cumsum(counts)])
    engine_of = np.zeros(problem.num_trajectories, dtype=np.int64)
    for k in np.unique(kinds):
        mine = kinds == k
        engine_of[mine] = first[k] + longest_first(problem.load_s[k, mine], int(counts[k]))[0]
    return layout_of(problem, kind_of, engine_of)


def improved(problem: Problem, layout: Placement, goal_s: float, max_changes: int = 300) -> Placement:
    """The layout after moves and swaps that each make the last engine earlier, until ``goal_s``, or until none helps."""
    best = layout
    for _ in range(max_changes):
        if best.time_s <= goal_s:
            break
        engine_of = _one_change(problem, best)
        if engine_of is None:
            break
        changed = layout_of(problem, best.kind_of, engine_of)
        later = changed.time_s > best.time_s or (
            changed.time_s == best.time_s and (changed.load_s**2).sum() >= (best.load_s**2).sum() * (1 - 1e-12)
        )
        if later:
            break
        best = changed
    return best


def _one_change(problem: Problem, layout: Placement) -> Ints | None:
    """``engine_of`` after the best move or swap of a trajectory on the last engine; None where all of them make it later."""
    kind_of, engine_of, load_s = layout.kind_of, layout.engine_of, layout.load_s
    rows = np.arange(problem.num_trajectories)
    done_s = load_s.copy()
    np.maximum.at(done_s, engine_of, problem.alone_s[kind_of[engine_of], rows])
    last = int(done_s.argmax())
    limit_s, kind = done_s[last], kind_of[last]
    best_s, change = limit_s * (1 - 1e-12), None
    for item in _some(np.flatnonzero(engine_of == last), problem.load_s[kind]):
        there = np.where(problem.least_s[kind_of, item] < limit_s, load_s + problem.load_s[kind_of, item], np.inf)
        there[last] = np.inf
        here = load_s[last] - problem.load_s[kind, item]
        after = np.maximum(there, here)
        engine = int(after.argmin())
        if after[engine] < best_s:
            best_s, change = float(after[engine]), (item, engine, -1)
        others = kind_of[engine_of]
        with np.errstate(invalid="ignore"):
            there = load_s[engine_of] - problem.load_s[others, rows] + problem.load_s[others, item]
            after = np.maximum(there, here + problem.load_s[kind])
        fits = (problem.least_s[others, item] < limit_s) & (problem.least_s[kind] < limit_s) & (engine_of != last)
        after = np.where(fits, after, np.inf)
        other = int(after.argmin())
        if after[other] < best_s:
            best_s, change = float(after[other]), (item, int(engine_of[other]), other)
    if change is None:
        return None
    item, engine, other = change
    changed = engine_of.copy()
    changed[item] = engine
    if other >= 0:
        changed[other] = last
    return changed


def _some(items: Ints, load_s: Floats, most: int = 24) -> list[int]:
    """At most ``most`` of the items, of all sizes: each costs a look at every trajectory."""
    if len(items) <= most:
        return [int(item) for item in items]
    by_size = items[np.argsort(load_s[items], kind="stable")]
    return [int(item) for item in by_size[np.linspace(0, len(items) - 1, most).astype(np.int64)]]
