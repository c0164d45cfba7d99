"""Search over splits between training and rollout, and rollout layouts on each number of GPUs.

The outer search is best first over the trainer's GPU counts. A layout tries the closed-form bound
of `libra.planner.planning_problem`, then the fluid program over classes, whose prices give cuts for
single trajectories, then, for few trajectories, the program over single ones. Allowing only kinds
that finish within theta makes programs linear: the best time is at least min(theta, the program's
time), and a few rounds of lower theta reach it.

1. Every split whose bound is below the best step has been solved at the end, so that ``lower_s``
   holds for every split, layout and assignment of whole trajectories.
2. ``lower_s <= step_s``; the search ends within ``gap_frac``, or when no other split can be proven
   better.
3. The ``lower_s`` of a layout on F GPUs holds for every layout and assignment of single
   trajectories, without binning.
4. ``layout`` places whole trajectories on whole engines; ``time_s >= lower_s``.
5. Each F is solved once (`Rollouts` is the memo), and a bound at F holds for every smaller number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.engine_packing import Placement, improved, pack, placement_of, spread
from libra.planner.planning_problem import Floats, GpuSeconds, Ints, Problem, gpu_seconds, splits_of

MAX_ROUNDS = 4
"""Maximum cuts per threshold; the remaining gap is reported."""
MAX_THRESHOLDS = 8
"""Thresholds tried per number of GPUs."""
WHOLE_CELLS = 300
"""Maximum trajectories x engines for the program over single trajectories."""
GAP_FRAC = 5e-4
"""Default gap at which a search stops: half of the 0.1 % that plans promise."""


@dataclass(slots=True)
class RolloutLayout:
    """The best layout found on ``num_gpus`` GPUs; no layout is faster than the proven ``lower_s``."""

    problem: Problem
    bound: GpuSeconds
    gap_frac: float
    num_gpus: int
    lower_s: float
    layout: Placement | None = None  # None: no layout satisfies the fixed engines
    time_s: float = np.inf  # of ``layout``
    binning_frac: float = 0.0  # largest relative error of the class program against its unbinned bound
    num_programs: int = 0
    enough_s: float = 0.0  # a shorter rollout does not shorten the step
    hopeless_s: float = np.inf  # the search stops when the bound exceeds this

    def offer(self, layout: Placement | None) -> None:
        """Keep a layout if it is faster than the best so far."""
        if layout is not None and layout.time_s < self.time_s:
            self.layout, self.time_s = layout, layout.time_s

    def prove(self, lower_s: float) -> None:
        """Record a bound; rounding never raises it above the time of a known layout."""
        self.lower_s = max(self.lower_s, min(lower_s, self.time_s))

    @property
    def goal_s(self) -> float:
        """Layout time that ends the search."""
        return max(self.enough_s, self.lower_s * (1 + self.gap_frac))

    @property
    def done(self) -> bool:
        """Whether the gap is small enough, or the bound exceeds ``hopeless_s``."""
        return self.time_s <= self.goal_s or self.lower_s >= self.hopeless_s

    def improve(self) -> None:
        """Search until `done`: packing, programs over classes, the program over single trajectories."""
        if not self.done and not self.problem.fixed_engines:
            self._pack()
        if not self.done:
            self._programs()
        cells = self.problem.num_trajectories * int((self.num_gpus // self.problem.tp).sum())
        if not self.done and cells <= WHOLE_CELLS:
            self._whole()

    def _pack(self) -> None:
        low_s = max(self.lower_s, self.enough_s)
        found, step = pack(self.problem, max(self.enough_s, low_s * (1 + self.gap_frac / 2)), self.num_gpus), 0.01
        while found is None and step < 1e4:
            found = pack(self.problem, low_s * (1 + step), self.num_gpus)
            low_s, step = (low_s if found else low_s * (1 + step)), step * 2
        self.offer(found)
        for _ in range(7):
            if self.done or self.time_s <= low_s * (1 + self.gap_frac):
                break
            middle_s = (low_s + self.time_s) / 2
            found = pack(self.problem, middle_s, self.num_gpus)
            self.offer(found)
            low_s = low_s if found else middle_s
        if self.layout is not None and not self.done:
            self.offer(improved(self.problem, self.layout, self.goal_s, max_changes=100))

    def _programs(self) -> None:
        """For every theta, T >= min(theta, best time over pairs within theta); theta rises until
        they meet."""
        theta_s = max(self.goal_s, float(self.bound.at_s[0]))
        longest_s = float(self.problem.least_s[np.isfinite(self.problem.least_s)].max())
        for _ in range(MAX_THRESHOLDS):
            value_s = self._within(theta_s)
            everything = theta_s >= longest_s
            self.prove(value_s if everything else min(theta_s, value_s))
            if self.done or everything or value_s <= theta_s * (1 + self.gap_frac / 4):
                break
            theta_s = min(longest_s, value_s, max(theta_s * 2, self.time_s if self.layout else 0.0))

    def _within(self, theta_s: float) -> float:
        """Lower bound over pairs that finish alone within ``theta_s``; offers the layouts that it finds."""
        from libra.planner.integer_programs import Classes, Pools

        pools, unit_s = Pools(self.problem.tp, self.num_gpus, self.problem.fixed_engines), max(self.lower_s, 1e-9)
        classes = Classes.within(self.problem, pools, theta_s * (1 + 1e-12), unit_s)
        if classes is None:
            return np.inf
        cuts, engines, bound_s = classes.first_cuts(), classes.engines(), 0.0
        self.num_programs += 1
        for _ in range(MAX_ROUNDS):
            self.num_programs += 1 + (engines is not None)
            priced = None if engines is None else classes.price(engines)
            if engines is not None and priced is not None:
                cuts.append(priced.cut)
                self.binning_frac = max(self.binning_frac, priced.binning_frac)
                layout = spread(self.problem, engines, priced.kinds)
                self.offer(layout)
                if self.goal_s < layout.time_s <= self.time_s * 1.2:
                    self.offer(improved(self.problem, layout, self.goal_s))
            last, answer = engines, classes.bound(cuts)
            if answer is None:
                return np.inf
            bound_s, engines = unit_s / max(answer[0], 1e-300), answer[1]
            met = self.time_s <= max(bound_s * (1 + self.gap_frac), self.goal_s)
            if met or (last is not None and (engines == last).all()):
                break
        return bound_s

    def _whole(self) -> None:
        from libra.planner.integer_programs import Pools, solve_whole

        problem, unit_s = self.problem, max(self.lower_s, 1e-9)
        most_s = float(problem.least_s[np.isfinite(problem.least_s)].sum())
        below = min(self.time_s, most_s) / unit_s * (1 + 1e-9)
        pools = Pools(problem.tp, self.num_gpus, problem.fixed_engines)
        self.num_programs += 1
        whole = solve_whole(problem.load_s / unit_s, problem.alone_s / unit_s, pools, below)
        if whole is None:
            return
        slots, engine_of = np.unique(whole.engine_of, return_inverse=True)  # drop slots without trajectories
        kinds = whole.kind_of[slots].tolist()
        for degree, number in problem.fixed_engines.items():  # add fixed engines that are idle
            kind = int(np.flatnonzero(problem.tp == degree)[0])
            kinds += [kind] * (number - int((problem.tp[kinds] == degree).sum()))
        self.offer(placement_of(problem, np.array(kinds, dtype=np.int64), engine_of.reshape(-1)))
        if whole.proven:
            self.prove(self.time_s)


class Rollouts:
    """Memo of rollout layouts by number of GPUs, each solved to within ``gap_frac`` of its bound."""

    def __init__(self, problem: Problem, gap_frac: float) -> None:
        self.problem, self.gap_frac, self.bound = problem, gap_frac, gpu_seconds(problem)
        self.found: dict[int, RolloutLayout] = {}

    @property
    def num_programs(self) -> int:
        """Programs solved so far."""
        return sum(layout.num_programs for layout in self.found.values())

    def lower_s(self, num_gpus: Ints) -> Floats:
        """Best known bound for each of ``num_gpus``: the closed form, and searches on more GPUs."""
        bound = self.bound.lower_s(num_gpus)
        for known in self.found.values():
            bound = np.maximum(bound, np.where(num_gpus <= known.num_gpus, known.lower_s, 0.0))
        return bound

    def solve(self, num_gpus: int, enough_s: float, hopeless_s: float) -> RolloutLayout:
        """The fastest layout on ``num_gpus`` GPUs; ``enough_s`` and ``hopeless_s`` as in `RolloutLayout`."""
        state = self.found.get(num_gpus)
        if state is None:
            lower_s = float(self.lower_s(np.array([num_gpus]))[0])
            state = self.found[num_gpus] = RolloutLayout(self.problem, self.bound, self.gap_frac, num_gpus, lower_s)
        state.enough_s, state.hopeless_s = enough_s, hopeless_s
        state.improve()
        return state


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best split and layout of a problem."""

    train_gpus: int
    rollout_gpus: int
    layout: Placement  # may use fewer than ``rollout_gpus`` if more gain nothing
    train_s: float
    rollout_s: float
    step_s: float
    lower_s: float  # no plan has a shorter step
    longest_s: float  # longest trajectory alone on its best kind: no number of GPUs is faster
    binning_frac: float  # largest error of the class programs against single trajectories
    num_splits: int  # solved
    num_programs: int  # integer and linear programs solved

    @property
    def gap_frac(self) -> float:
        """Proven relative gap: the optimum is at most this much shorter."""
        return self.step_s / self.lower_s - 1 if self.lower_s > 0 else float("inf")


@dataclass(slots=True)
class Planner:
    """A search to within ``gap_frac`` of the bound, with rollout layouts of recent workloads in a memo."""

    gap_frac: float = GAP_FRAC
    memo: dict[str, Rollouts] = field(default_factory=dict)

    def search(self, problem: Problem) -> Found:
        """The best split and layout; PlanError names the constraint if nothing fits."""
        splits, digest = splits_of(problem), problem.rollout_digest
        if digest not in self.memo:
            self.memo = {**dict(list(self.memo.items())[-7:]), digest: Rollouts(problem, self.gap_frac)}
        return _best_first(problem, splits, self.memo[digest])


def search(problem: Problem, gap_frac: float = GAP_FRAC) -> Found:
    """The best split and layout, within ``gap_frac`` of the bound if provable."""
    return Planner(gap_frac).search(problem)


def _best_first(problem: Problem, splits: Ints, rollouts: Rollouts) -> Found:
    train_s, gpus = problem.train_s[splits], problem.train_gpus[splits]
    rollout_gpus, good_frac = problem.num_gpus - gpus, 1 - rollouts.gap_frac / 2
    bounds = problem.step_s(gpus, train_s, rollouts.lower_s(rollout_gpus))
    is_open: NDArray[np.bool_] = np.ones(len(splits), dtype=bool)
    programs, closed_s = rollouts.num_programs, list[float]()
    best: RolloutLayout | None = None
    best_split, best_s = -1, np.inf
    while is_open.any():
        split = int(np.lexsort((gpus, np.where(is_open, bounds, np.inf)))[0])
        if bounds[split] >= best_s * good_frac or bounds[split] == np.inf:
            break
        is_open[split] = False
        here = int(gpus[split]), float(train_s[split])
        hopeless_s = problem.most_s(*here, best_s * good_frac)
        state = rollouts.solve(int(rollout_gpus[split]), problem.enough_s(*here), hopeless_s)
        step_s = float(problem.step_s(*here, state.time_s))
        if state.layout is not None and step_s < best_s:
            best, best_split, best_s = state, split, step_s
        closed_s.append(float(problem.step_s(*here, state.lower_s)))
        proven_s = np.where(rollout_gpus <= state.num_gpus, state.lower_s, 0.0)
        bounds = np.maximum(bounds, problem.step_s(gpus, train_s, proven_s))
    if best is None or best.layout is None:
        raise PlanError(
            f"fixed_engines: no layout on {int(rollout_gpus.max())} GPUs has engines {dict(problem.fixed_engines)} that "
            "can take every trajectory; leave a TP degree free, or fix more engines of a higher one"
        )
    return Found(
        train_gpus=int(gpus[best_split]),
        rollout_gpus=best.num_gpus,
        layout=best.layout,
        train_s=float(train_s[best_split]),
        rollout_s=best.time_s,
        step_s=best_s,
        lower_s=min([best_s, *closed_s, *bounds[is_open].tolist()]),
        longest_s=float(rollouts.bound.at_s[0]),
        binning_frac=max(state.binning_frac for state in rollouts.found.values()),
        num_splits=len(closed_s),
        num_programs=rollouts.num_programs - programs,
    )
