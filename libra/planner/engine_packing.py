"""A feasible layout of whole trajectories on whole engines, found without a solver.

Longest first onto the least loaded engine of its kind, then moves and swaps away from the last
engine to finish. The result need not be optimal: `libra.planner.planning_problem` and the programs
bound its gap.

If degrees divide one another and the node size, placing the largest engines first wastes no GPU, as
long as training ranks partly fill at most one node. The trainer therefore takes the smaller last
node first, then whole nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libra.errors import PlanError
from libra.planner.planning_problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Kind of each engine (E,), indexing ``Problem.kinds``, and engine of each trajectory (N,).

    ``load_s`` (E,) sums the loads on each engine; ``time_s`` is when the last engine finishes: the
    largest load, or the longest trajectory alone.
    """

    kind_of: Ints
    engine_of: Ints
    load_s: Floats
    time_s: float

    def counts(self, num_kinds: int) -> Ints:
        """Number of engines of each kind, (K,)."""
        return np.bincount(self.kind_of, minlength=num_kinds)

    def gpus(self, problem: Problem) -> int:
        """Total GPUs of all engines."""
        return int(problem.tp[self.kind_of].sum())


def cheapest_kinds(problem: Problem, within_s: float) -> Ints:
    """(N,) kind with the fewest GPU-seconds that finishes trajectory i in ``within_s``, or -1.

    The smaller engine wins a tie.
    """
    with np.errstate(invalid="ignore"):
        cost = np.where(problem.least_s <= within_s, problem.tp[:, None] * problem.load_s, np.inf)
    best: Ints = cost.argmin(axis=0)
    best[~np.isfinite(cost.min(axis=0))] = -1
    return best


def placement_of(problem: Problem, kind_of: Ints, engine_of: Ints) -> Placement:
    """The placement with its loads and its time computed."""
    kinds = kind_of[engine_of]
    rows = np.arange(problem.num_trajectories)
    load_s: Floats = np.bincount(engine_of, problem.load_s[kinds, rows], len(kind_of)).astype(np.float64)
    return Placement(kind_of, engine_of, load_s, float(max(load_s.max(), problem.alone_s[kinds, rows].max())))


def longest_first(load_s: Floats, num_engines: int) -> tuple[Ints, float]:
    """Engine of each load (n,), placed longest first on the least loaded, and the largest sum."""
    engine_of = np.zeros(len(load_s), dtype=np.int64)
    heap = [(0.0, engine) for engine in range(num_engines)]
    for item in np.argsort(-load_s, kind="stable").tolist():
        total, engine = heap[0]
        engine_of[item] = engine
        heapq.heapreplace(heap, (total + float(load_s[item]), engine))
    return engine_of, max(total for total, _ in heap)


def pack(problem: Problem, within_s: float, num_gpus: int, load_within_s: float | None = None) -> Placement | None:
    """A placement within ``within_s`` on ``num_gpus`` GPUs, on cheapest kinds, or None.

    ``load_within_s``, if given, is a lower limit on each engine's load, which only a single
    trajectory may exceed.
    """
    limit_s = within_s if load_within_s is None else load_within_s
    kinds = cheapest_kinds(problem, within_s)
    if (kinds < 0).any():
        return None
    kind_of: list[int] = []
    engine_of = np.zeros(problem.num_trajectories, dtype=np.int64)
    totals = {int(k): problem.load_s[k, kinds == k] for k in np.unique(kinds)}
    fewest = {k: min(len(load), max(1, int(np.ceil(load.sum() / limit_s - 1e-9)))) for k, load in totals.items()}
    left = num_gpus - sum(number * problem.kinds[k].tp for k, number in fewest.items())
    if left < 0:
        return None
    for k, load in totals.items():
        number, step, most_s = fewest[k], 1, max(limit_s, float(load.max()))
        placed, time_s = longest_first(load, number)
        while time_s > most_s and step * problem.kinds[k].tp <= left:
            number, left, step = number + step, left - step * problem.kinds[k].tp, step * 2
            placed, time_s = longest_first(load, number)
        if time_s > most_s:
            return None
        engine_of[kinds == k] = placed + len(kind_of)
        kind_of += [k] * number
    return placement_of(problem, np.array(kind_of, dtype=np.int64), engine_of)


def filled(problem: Problem, placement: Placement, num_gpus: int) -> Placement:
    """The placement with spare GPUs used to lower engine loads; it never finishes later."""
    best, low_s, high_s = placement, placement.time_s / 256, placement.time_s
    for _ in range(9):
        if best.gpus(problem) > num_gpus - int(problem.tp.min()):
            break
        middle_s = (low_s * high_s) ** 0.5
        found = pack(problem, placement.time_s, num_gpus, middle_s)
        if found is not None and found.time_s <= placement.time_s:
            best, high_s = found, middle_s
        else:
            low_s = middle_s
    return best


def spread(problem: Problem, counts: Ints, kinds: Ints) -> Placement:
    """A placement with ``counts`` (K,) engines and trajectory i on an engine of kind ``kinds[i]`` (N,)."""
    kind_of = np.repeat(np.arange(len(counts)), counts)
    first = np.concatenate([[0], np.cumsum(counts)])
    engine_of = np.zeros(problem.num_trajectories, dtype=np.int64)
    for k in np.unique(kinds):
        mine = kinds == k
        engine_of[mine] = first[k] + longest_first(problem.load_s[k, mine], int(counts[k]))[0]
    return placement_of(problem, kind_of, engine_of)


def improved(problem: Problem, placement: Placement, goal_s: float, max_changes: int = 600) -> Placement:
    """The placement after moves and swaps that shorten the last engine, until ``goal_s`` or no gain."""
    kind_of, engine_of, load_s = placement.kind_of, placement.engine_of.copy(), placement.load_s.copy()
    alone_s = problem.alone_s[kind_of[engine_of], np.arange(problem.num_trajectories)]
    for _ in range(max_changes):
        longest = np.zeros_like(load_s)
        np.maximum.at(longest, engine_of, alone_s)
        done_s = np.maximum(load_s, longest)
        last = int(done_s.argmax())
        if done_s[last] <= goal_s or not (change := _one_change(problem, kind_of, engine_of, load_s, last)):
            break
        for item, engine in change:
            load_s[engine_of[item]] -= problem.load_s[kind_of[engine_of[item]], item]
            load_s[engine] += problem.load_s[kind_of[engine], item]
            engine_of[item], alone_s[item] = engine, problem.alone_s[kind_of[engine], item]
    after = placement_of(problem, kind_of, engine_of)
    return after if after.time_s < placement.time_s else placement


def _one_change(problem: Problem, kind_of: Ints, engine_of: Ints, load_s: Floats, last: int) -> list[tuple[int, int]]:
    """The move or swap away from engine ``last`` that minimises the later end of its two engines.

    Pairs (trajectory, new engine); empty if no move or swap helps.
    """
    kind, mine = kind_of[last], np.flatnonzero(engine_of == last)
    limit_s = max(load_s[last], float(problem.alone_s[kind, mine].max(initial=0.0))) * (1 - 1e-12)
    others, engines = np.flatnonzero(engine_of != last), np.flatnonzero(np.arange(len(load_s)) != last)
    their_engine = engine_of[others]
    theirs, at = kind_of[their_engine], kind_of[engines]
    without = load_s[their_engine] - problem.load_s[theirs, others]
    back = np.where(problem.least_s[kind, others] <= limit_s, problem.load_s[kind, others], np.inf)
    best_s, change = limit_s, list[tuple[int, int]]()
    for item in _some(mine, problem.load_s[kind]):
        here = load_s[last] - problem.load_s[kind, item]
        fits = problem.least_s[:, item] <= limit_s
        load = np.where(fits, problem.load_s[:, item], np.inf)
        if len(engines):
            after = np.maximum(load_s[engines] + load[at], here)
            pick = int(after.argmin())
            if after[pick] < best_s:
                best_s, change = float(after[pick]), [(item, int(engines[pick]))]
        if len(others):
            after = np.maximum(without + load[theirs], here + back)
            pick = int(after.argmin())
            if after[pick] < best_s:
                best_s = float(after[pick])
                change = [(item, int(their_engine[pick])), (int(others[pick]), last)]
    return change


def _some(items: Ints, load_s: Floats, most: int = 24) -> list[int]:
    """At most ``most`` of the items, over all sizes, since each is compared with every trajectory."""
    if len(items) <= most:
        return [int(item) for item in items]
    by_size = items[np.argsort(load_s[items], kind="stable")]
    return [int(item) for item in by_size[np.linspace(0, len(items) - 1, most).astype(np.int64)]]


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``num_nodes`` equal nodes: GPUs for training, engines by TP degree, free GPUs."""

    num_nodes: int
    train_gpus: int
    engines: Mapping[int, int]
    free_gpus: int


def placed(num_gpus: int, gpus_per_node: int, train_gpus: int, engines: Mapping[int, int]) -> tuple[NodeGroup, ...]:
    """Nodes by content, the trainer's first; PlanError if engines or trainer do not fit."""
    wanted = train_gpus + sum(tp * number for tp, number in engines.items())
    if wanted > num_gpus:
        raise PlanError(
            f"planner.num_gpus: {wanted} GPUs are needed, {num_gpus} are available; type planner.num_gpus={wanted}"
        )
    full, rest = divmod(num_gpus, gpus_per_node)
    missing, nodes = (
        dict(sorted(engines.items(), reverse=True)),
        Counter[tuple[int, tuple[tuple[int, int], ...], int]](),
    )
    for size in ([rest] if rest else []) + [gpus_per_node] * full:
        trained = min(train_gpus, size)
        train_gpus, free, held = train_gpus - trained, size - trained, dict[int, int]()
        for tp in missing:
            if here := min(missing[tp], free // tp):
                held[tp], missing[tp], free = here, missing[tp] - here, free - here * tp
        nodes[trained, tuple(sorted(held.items())), free] += 1
    for tp, number in missing.items():
        if number:
            raise PlanError(
                f"TP{tp}: {number} engines find no node of {gpus_per_node} GPUs with room; degrees have to nest"
            )
    return tuple(NodeGroup(number, trained, dict(held), free) for (trained, held, free), number in nodes.items())
