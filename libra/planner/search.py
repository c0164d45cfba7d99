"""The split between training and rollout, exactly: best first over the trainer's GPU counts, by proven bounds.

1. Every split whose bound is below the best step found has been solved when the search ends, so that ``lower_s`` holds for
   every split, every layout and every assignment of whole trajectories.
2. ``lower_s <= step_s``; the search ends when they differ by at most ``gap_frac``, or when no other split can be proven
   better.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.engine_packing import Placement
from libra.planner.feasible import splits_of
from libra.planner.planning_problem import Ints, Problem
from libra.planner.rollout_layout import RolloutLayout, Rollouts

GAP_FRAC = 5e-4
"""Default gap at which a search stops: half of the 0.1 % that a plan promises."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best split and layout of a problem.

    Attributes
    ----------
    train_gpus, rollout_gpus : int
        The rollout's GPUs may exceed those of ``layout``: the rest would gain nothing.
    layout : Placement
        Its kinds are indices into ``Problem.kinds``.
    train_s, rollout_s, step_s : float
    lower_s : float
        No plan has a shorter step.
    rollout_lower_s : float
        No layout on ``rollout_gpus`` has a shorter rollout.
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
    rollout_lower_s: float
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
        """The best split and layout.

        Raises
        ------
        PlanError
            Nothing fits; the message names the constraint.
        """
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
            rollout_lower_s=self.best.lower_s,
            longest_s=float(self.rollouts.bound.at_s[0]),
            binning_frac=max(state.binning_frac for state in self.rollouts.found.values()),
            num_splits=num_splits,
            num_programs=num_programs,
        )
