"""The split between training and rollout, and the rollout's layout on each number of GPUs, exactly.

The outer search is best first over the trainer's GPU counts, by proven bounds:

1. Every split whose bound is below the best step found has been solved when the search ends, so that
   ``lower_s`` holds for every split, every layout and every assignment of whole trajectories.
2. ``lower_s <= step_s``; the search ends when they differ by at most ``gap_frac``, or when no other split
   can be proven better.

The layout on F GPUs comes with a proven bound:

3. ``lower_s`` holds for every layout and every assignment of individual trajectories, without binning.
4. ``layout`` places whole trajectories on whole engines; ``time_s >= lower_s``.
5. Each F is solved once (`Rollouts` is the memo), and a bound at F holds for every smaller one.

In order of cost: the closed-form bound of `libra.planner.planning_problem` and a layout that meets it; else
the fluid program over classes, whose prices become cuts that hold for the unbinned trajectories; else, if
there are few, the program over single trajectories. The threshold "only kinds that finish within theta"
makes the programs linear: the best time is at least min(theta, the program's time), and lowering theta to
it takes only a few rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.engine_packing import Placement, improved, pack, placement_of, spread
from libra.planner.integer_programs import Classes, Pools, solve_priced, solve_whole
from libra.planner.planning_problem import Floats, GpuSeconds, Ints, Problem, gpu_seconds, splits_of

MAX_ROUNDS = 4
"""Maximum cuts per threshold before the remaining gap is reported."""
MAX_THRESHOLDS = 8
"""Thresholds tried per number of GPUs."""
WHOLE_CELLS = 300
"""Trajectories x engines up to which single trajectories are assigned by a program: above it, a program takes minutes."""


@dataclass(slots=True)
class RolloutLayout:
    """The best layout found on ``num_gpus`` GPUs (None if nothing satisfies the fixed parts), and the proven bound.

    No layout is faster than ``lower_s``; this one takes ``time_s``. ``binning_frac`` is the largest relative difference
    between the fluid program over classes and its unbinned bound at the same layout (0 if no program was needed).
    """

    num_gpus: int
    layout: Placement | None
    lower_s: float
    time_s: float
    binning_frac: float = 0.0
    num_programs: int = 0

    def offer(self, layout: Placement | None) -> None:
        """Keep a layout if it is faster than the best so far."""
        if layout is not None and layout.time_s < self.time_s:
            self.layout, self.time_s = layout, layout.time_s

    def prove(self, lower_s: float) -> None:
        """Record a bound; rounding never raises it above an existing layout."""
        self.lower_s = max(self.lower_s, min(lower_s, self.time_s))


@dataclass(slots=True)
class Rollouts:
    """Memo of rollout layouts of one problem by number of GPUs; kinds that another one dominates are left out.

    A layout within ``gap_frac`` of its bound is good enough.
    """

    problem: Problem
    gap_frac: float
    bound: GpuSeconds = field(init=False)
    kept: NDArray[np.bool_] = field(init=False)
    found: dict[int, RolloutLayout] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = undominated(self.problem)
        self.problem = self.problem.only(self.kept)
        self.bound = gpu_seconds(self.problem)

    def lower_s(self, num_gpus: Ints) -> Floats:
        """Best bound known for each of ``num_gpus``: in closed form, and from searches on more GPUs."""
        bound = self.bound.lower_s(num_gpus)
        for known in self.found.values():
            scaled = np.where(num_gpus <= known.num_gpus, known.lower_s, 0.0)
            bound = np.maximum(bound, scaled)
        return bound

    def solve(self, num_gpus: int, enough_s: float = 0.0, hopeless_s: float = np.inf) -> RolloutLayout:
        """The fastest layout on ``num_gpus`` GPUs.

        A time below ``enough_s`` has no benefit, e.g. because the trainer takes as long. The search stops when the bound
        passes ``hopeless_s``: the layout may then be poor, but the bound holds.
        """
        state = self.found.get(num_gpus)
        if state is None:
            state = RolloutLayout(num_gpus, None, float(self.lower_s(np.array([num_gpus]))[0]), np.inf)
            self.found[num_gpus] = state
        search = _Search(self, state, enough_s, hopeless_s)
        if not search.done():
            search.run()
        return state


def undominated(problem: Problem) -> NDArray[np.bool_]:
    """Which kinds (K,) are not beaten, or equalled by an earlier one, on GPUs, every load and every time alone."""
    keep = np.ones(len(problem.kinds), dtype=bool)
    for k in range(len(problem.kinds)):
        for other in np.flatnonzero(keep):
            if other == k or problem.tp[other] > problem.tp[k]:
                continue
            if problem.tp[other] != problem.tp[k] and problem.fixed_engines:
                continue
            better = (problem.load_s[other] <= problem.load_s[k]).all() and (
                problem.alone_s[other] <= problem.alone_s[k]
            ).all()
            if better:
                keep[k] = False
                break
    return keep


@dataclass(slots=True)
class _Search:
    """One search on one number of GPUs, which stops as soon as the gap is small enough."""

    memo: Rollouts
    state: RolloutLayout
    enough_s: float
    hopeless_s: float

    @property
    def problem(self) -> Problem:
        return self.memo.problem

    @property
    def pools(self) -> Pools:
        return Pools(self.problem.tp, self.state.num_gpus, self.problem.fixed_engines)

    def goal_s(self) -> float:
        """A layout this fast ends the search."""
        return max(self.enough_s, self.state.lower_s * (1 + self.memo.gap_frac))

    def done(self) -> bool:
        return self.state.time_s <= self.goal_s() or self.state.lower_s >= self.hopeless_s

    def run(self) -> None:
        if not self.problem.fixed_engines:
            self._pack()
        if not self.done():
            self._programs()
        cells = self.problem.num_trajectories * int((self.state.num_gpus // self.problem.tp).sum())
        if cells <= WHOLE_CELLS and not self.done():
            self._whole()

    def _pack(self) -> None:
        """Layouts by packing, within the shortest time for which it succeeds."""
        gpus, low_s = self.state.num_gpus, max(self.state.lower_s, self.enough_s)
        found, step = pack(self.problem, max(self.enough_s, low_s * (1 + self.memo.gap_frac / 2)), gpus), 0.01
        while found is None and step < 1e4:
            found = pack(self.problem, low_s * (1 + step), gpus)
            low_s, step = (low_s if found else low_s * (1 + step)), step * 2
        self.state.offer(found)
        for _ in range(7):
            if self.done() or self.state.time_s <= low_s * (1 + self.memo.gap_frac):
                break
            middle_s = (low_s + self.state.time_s) / 2
            found = pack(self.problem, middle_s, gpus)
            self.state.offer(found)
            low_s = low_s if found else middle_s
        if self.state.layout is not None and not self.done():
            self.state.offer(improved(self.problem, self.state.layout, self.goal_s(), max_changes=100))

    def _programs(self) -> None:
        """Layouts and bounds from the programs. A layout that finishes in T uses only pairs that finish alone within T, so
        that for every theta its T is at least min(theta, best time over pairs done within theta); theta rises until the two
        meet.
        """
        theta_s = max(self.goal_s(), float(self.memo.bound.at_s[0]))
        longest_s = float(self.problem.least_s[np.isfinite(self.problem.least_s)].max())
        for _ in range(MAX_THRESHOLDS):
            value_s = self._within(theta_s)
            everything = theta_s >= longest_s
            self.state.prove(value_s if everything else min(theta_s, value_s))
            if self.done() or everything or value_s <= theta_s * (1 + self.memo.gap_frac / 4):
                break
            theta_s = min(longest_s, value_s, max(theta_s * 2, self.state.time_s if self.state.layout else 0.0))

    def _within(self, theta_s: float) -> float:
        """A lower bound of every layout that uses only pairs that finish alone within ``theta_s``; offers the layouts it
        finds."""
        problem, pools, unit_s = self.problem, self.pools, max(self.state.lower_s, 1e-9)
        classes = Classes.within(problem, theta_s * (1 + 1e-12), unit_s)
        if classes is None:
            return np.inf
        pools = replace(pools, cover=classes.cover)
        cuts = classes.first_cuts(problem.tp)
        self.state.num_programs += 1
        engines = classes.engines(pools)
        bound_s = 0.0
        for _ in range(MAX_ROUNDS):
            if engines is not None:
                self.state.num_programs += 1
                priced = classes.price(engines)
                if priced is not None:
                    cuts.append(priced.cut)
                    self.state.binning_frac = max(self.state.binning_frac, priced.binning_frac)
                    self._offer(engines, priced.kinds)
            last, engines = engines, None
            self.state.num_programs += 1
            answer = solve_priced(cuts, pools)
            if answer is None:
                return np.inf
            bound_s, engines = unit_s / max(answer[0], 1e-300), answer[1]
            met = self.state.time_s <= max(bound_s * (1 + self.memo.gap_frac), self.goal_s())
            if met or (last is not None and (engines == last).all()):
                break
        return bound_s

    def _offer(self, engines: Ints, kinds: Ints) -> None:
        """Offer the layout with these engines (K,) and each trajectory on this kind (N,)."""
        layout = spread(self.problem, engines, kinds)
        self.state.offer(layout)
        if layout.time_s > self.goal_s() and layout.time_s <= self.state.time_s * 1.2:
            self.state.offer(improved(self.problem, layout, self.goal_s()))

    def _whole(self) -> None:
        """The best assignment of single trajectories, proven."""
        problem, unit_s = self.problem, max(self.state.lower_s, 1e-9)
        least_s = problem.least_s[np.isfinite(problem.least_s)]
        below_s = self.state.time_s if self.state.layout is not None else float(least_s.sum())
        self.state.num_programs += 1
        whole = solve_whole(
            problem.load_s / unit_s, problem.alone_s / unit_s, self.pools, below_s / unit_s * (1 + 1e-9)
        )
        if whole is None:
            return
        self.state.offer(self._in_use(whole.kind_of, whole.engine_of))
        if whole.proven:
            self.state.prove(self.state.time_s)

    def _in_use(self, kind_of: Ints, engine_of: Ints) -> Placement:
        """The placement without slots that have no trajectory, and with the fixed engines that are idle."""
        slots, engine_of = np.unique(engine_of, return_inverse=True)
        kinds = kind_of[slots].tolist()
        for degree, number in self.problem.fixed_engines.items():
            kind = int(np.flatnonzero(self.problem.tp == degree)[0])
            kinds += [kind] * (number - int((self.problem.tp[kinds] == degree).sum()))
        return placement_of(self.problem, np.array(kinds, dtype=np.int64), engine_of.reshape(-1))


GAP_FRAC = 5e-4
"""Default gap at which a search stops: half of the 0.1 % that a plan promises."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best split and layout of a problem.

    Attributes
    ----------
    layout : Placement
        Its kinds are indices into ``Problem.kinds``. It may use fewer than ``rollout_gpus``: the rest would gain nothing.
    lower_s : float
        No plan has a shorter step.
    longest_s : float
        The longest trajectory alone on its best kind: no number of GPUs makes the rollout shorter.
    binning_frac : float
        Largest error of the programs over classes, against the trajectories themselves.
    num_splits, num_programs : int
        Splits solved, integer and linear programs solved.
    """

    train_gpus: int
    rollout_gpus: int
    layout: Placement
    train_s: float
    rollout_s: float
    step_s: float
    lower_s: float
    longest_s: float
    binning_frac: float
    num_splits: int
    num_programs: int

    @property
    def gap_frac(self) -> float:
        """Proven: the best step of all is at most this much shorter, relatively."""
        return self.step_s / self.lower_s - 1 if self.lower_s > 0 else float("inf")


@dataclass(slots=True)
class Planner:
    """Searches with a memo of the rollout layouts of the last workload.

    Parameters
    ----------
    gap_frac : float
        A step within this of the proven bound is good enough.
    """

    gap_frac: float = GAP_FRAC
    memo: dict[str, Rollouts] = field(default_factory=dict)

    def search(self, problem: Problem) -> Found:
        """The best split and layout; PlanError, which names the constraint, if nothing fits."""
        splits = splits_of(problem)
        rollouts = self.memo.get(problem.rollout_digest)
        if rollouts is None:
            rollouts = Rollouts(problem, self.gap_frac)
            self.memo = {**dict(list(self.memo.items())[-7:]), problem.rollout_digest: rollouts}
        return _Outer(problem, splits, rollouts).run()


def search(problem: Problem, gap_frac: float = GAP_FRAC) -> Found:
    """The best split and layout of a problem, within ``gap_frac`` of the proven bound if that can be proven."""
    return Planner(gap_frac).search(problem)


@dataclass(slots=True)
class _Outer:
    """One best-first search. ``splits`` are indices into the trainer's table."""

    problem: Problem
    splits: Ints
    rollouts: Rollouts
    best: RolloutLayout | None = None
    best_split: int = -1
    best_s: float = np.inf
    closed_s: list[float] = field(default_factory=list)

    def run(self) -> Found:
        train_s, gpus = self.problem.train_s[self.splits], self.problem.train_gpus[self.splits]
        rollout_gpus = self.problem.num_gpus - gpus
        step_s = self.problem.step_s
        bounds = step_s(gpus, train_s, self.rollouts.lower_s(rollout_gpus))
        is_open: NDArray[np.bool_] = np.ones(len(self.splits), dtype=bool)
        programs, known = sum(f.num_programs for f in self.rollouts.found.values()), 0
        while is_open.any():
            split = int(np.lexsort((gpus, np.where(is_open, bounds, np.inf)))[0])
            if bounds[split] >= self.best_s * (1 - self.rollouts.gap_frac / 2) or bounds[split] == np.inf:
                break
            is_open[split] = False
            known += 1
            state = self._work_out(split, float(train_s[split]), int(rollout_gpus[split]))
            self.closed_s.append(float(step_s(int(gpus[split]), float(train_s[split]), state.lower_s)))
            bounds = np.maximum(
                bounds, step_s(gpus, train_s, np.where(rollout_gpus <= state.num_gpus, state.lower_s, 0.0))
            )
        if self.best is None or self.best.layout is None:
            raise PlanError(
                f"fixed_engines: no layout on {int(rollout_gpus.max())} GPUs has engines {dict(self.problem.fixed_engines)} that "
                "can take every trajectory; leave a TP degree free, or fix more engines of a higher one"
            )
        lower_s = min([self.best_s, *self.closed_s, *bounds[is_open].tolist()])
        now = sum(f.num_programs for f in self.rollouts.found.values())
        return self._found(lower_s, known, now - programs)

    def _work_out(self, split: int, train_s: float, rollout_gpus: int) -> RolloutLayout:
        problem, train_gpus = self.problem, int(self.problem.train_gpus[self.splits[split]])
        hopeless_s = problem.most_s(train_gpus, train_s, self.best_s * (1 - self.rollouts.gap_frac / 2))
        state = self.rollouts.solve(rollout_gpus, problem.enough_s(train_gpus, train_s), hopeless_s)
        step_s = float(problem.step_s(train_gpus, train_s, state.time_s))
        if state.layout is not None and step_s < self.best_s:
            self.best, self.best_split, self.best_s = state, split, step_s
        return state

    def _found(self, lower_s: float, num_splits: int, num_programs: int) -> Found:
        assert self.best is not None and self.best.layout is not None
        index = int(self.splits[self.best_split])
        names = np.flatnonzero(self.rollouts.kept)
        layout = self.best.layout
        return Found(
            train_gpus=int(self.problem.train_gpus[index]),
            rollout_gpus=self.best.num_gpus,
            layout=Placement(names[layout.kind_of], layout.engine_of, layout.load_s, layout.time_s),
            train_s=float(self.problem.train_s[index]),
            rollout_s=self.best.time_s,
            step_s=self.best_s,
            lower_s=lower_s,
            longest_s=float(self.rollouts.bound.at_s[0]),
            binning_frac=max(state.binning_frac for state in self.rollouts.found.values()),
            num_splits=num_splits,
            num_programs=num_programs,
        )
