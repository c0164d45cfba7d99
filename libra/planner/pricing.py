"""Prices of engines from classes of trajectories, and cuts from prices that hold for the trajectories themselves.

At prices p of an engine of each kind, trajectory i costs at least pi_i = min over its allowed kinds of p_k load_s[k, i] / T per
second of rollout, on any engine. Hence p . engines >= (sum of pi_i) / T for every layout: a cut. The classes only suggest p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from libra.planner.engine_packing import cheapest_kinds
from libra.planner.integer_programs import Cut, Pools, solve_fluid, solve_prices
from libra.planner.length_classes import ratio_classes
from libra.planner.planning_problem import Floats, Ints, Problem

MAX_CLASSES = 40
"""Classes of the program that chooses the engines. More classes improve the prices; the bounds hold with any number."""


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """The solution over classes for given engines.

    Attributes
    ----------
    cut : Cut
        Holds for every layout.
    binning_frac : float
        Relative difference of the classes' time of these engines from the unbinned bound at the same prices.
    kinds : int array (N,)
        A kind for each trajectory that balances these engines.
    """

    cut: Cut
    binning_frac: float
    kinds: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Trajectories grouped by the kinds they may run on within a threshold, and by ratio of loads.

    Attributes
    ----------
    load, allowed : arrays (K, N)
        Loads in the program's unit of time, 0 if not allowed.
    class_of : int array (N,)
    class_load, class_allowed : arrays (K, C)
        Sum over each class.
    useful : int array
        Kinds to which the choice of engines is restricted, to keep that program small; cuts cover all kinds.
    """

    load: Floats
    allowed: NDArray[np.bool_]
    class_of: Ints
    class_load: Floats
    class_allowed: NDArray[np.bool_]
    useful: Ints

    @property
    def cover(self) -> NDArray[np.bool_]:
        """The sets of kinds (S, K) that trajectories are allowed on."""
        return np.unique(self.class_allowed.T, axis=0)

    def first_cuts(self, tp: Ints) -> list[Cut]:
        """Cuts at the price of the GPUs: of all kinds, and of each set of kinds that is the only choice of some
        trajectories."""
        return [self.cut_at(tp.astype(float)), *(self.cut_at(tp * kinds) for kinds in self.cover if not kinds.all())]

    @classmethod
    def within(cls, problem: Problem, theta_s: float, unit_s: float) -> Self | None:
        """Classes for pairs that finish alone within ``theta_s``; None if some trajectory has no such pair."""
        allowed = problem.least_s <= theta_s
        if not allowed.any(axis=0).all():
            return None
        load = np.where(allowed, problem.load_s, 0.0) / unit_s
        useful = _useful_kinds(problem, allowed, theta_s)
        if problem.num_trajectories <= MAX_CLASSES:
            class_of = np.arange(problem.num_trajectories)
        else:
            class_of = ratio_classes(load[useful], allowed[useful], MAX_CLASSES)
        num = int(class_of.max()) + 1
        class_load: Floats = np.stack([np.bincount(class_of, weights=row, minlength=num) for row in load]).astype(
            np.float64
        )
        class_allowed = np.stack([np.bincount(class_of, weights=~row, minlength=num) == 0 for row in allowed])
        return cls(load, allowed, class_of, class_load, class_allowed, useful)

    def cut_at(self, price: Floats) -> Cut:
        """The cut of these prices (K,), over the trajectories themselves."""
        cost = np.where(self.allowed, price[:, None] * self.load, np.inf)
        return Cut(price, float(cost.min(axis=0).sum()))

    def engines(self, pools: Pools) -> Ints | None:
        """Engines of each kind (K,) that suit the classes best; None if none do."""
        part = Pools(pools.tp[self.useful], pools.num_gpus, pools.fixed, self.cover[:, self.useful])
        fluid = solve_fluid(self.class_load[self.useful], self.class_allowed[self.useful], part)
        if fluid is None:
            return None
        engines = np.zeros(len(pools.tp), dtype=np.int64)
        engines[self.useful] = fluid
        return engines

    def price(self, engines: Ints) -> Priced | None:
        """Prices and a balanced assignment for these engines (K,); None if they cannot take every trajectory."""
        prices = solve_prices(self.class_load, self.class_allowed, engines)
        if prices is None:
            return None
        price, have = prices.price, engines > 0
        value = np.where(self.allowed[have], price[have, None] * self.load[have], np.inf).min(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(self.allowed & (self.load > 0), value / self.load, 0.0).max(axis=1)
        cut = self.cut_at(np.where(have, price, worth))
        unbinned = cut.due / max(float(cut.price @ engines), 1e-300)
        return Priced(cut, abs(1 / (prices.rate * unbinned) - 1), self._apart(prices.shares))

    def _apart(self, shares: Floats) -> Ints:
        """A kind for each trajectory, so that about the shares ``shares`` (K, C) of each class's weight are on each
        kind."""
        kinds = np.zeros(len(self.class_of), dtype=np.int64)
        for number in range(shares.shape[1]):
            mine = np.flatnonzero(self.class_of == number)
            on = np.flatnonzero(shares[:, number] > 1e-9)
            if len(on) == 1:
                kinds[mine] = on[0]
                continue
            weight = self.load[on][:, mine].mean(axis=0)
            mine = mine[np.argsort(-weight, kind="stable")]
            left = shares[on, number] * weight.sum()
            for item, size in zip(mine, np.sort(weight)[::-1], strict=True):
                best = int(left.argmax())
                kinds[item] = on[best]
                left[best] -= size
        return kinds


def _useful_kinds(problem: Problem, allowed: NDArray[np.bool_], theta_s: float) -> Ints:
    """Kinds that are cheapest for a trajectory, or cheapest in total among those of their degree; all of up to eight."""
    num = len(problem.kinds)
    if num <= 8:
        return np.arange(num)
    cost = np.where(allowed, problem.tp[:, None] * problem.load_s, np.inf)
    share = np.bincount(cheapest_kinds(problem, theta_s), minlength=num)
    useful = set(np.argsort(-share, kind="stable")[:6].tolist()) & set(np.flatnonzero(share).tolist())
    for degree in np.unique(problem.tp):
        same = np.flatnonzero(problem.tp == degree)
        reach = np.isfinite(cost[same]).sum(axis=1)
        total = np.where(np.isfinite(cost[same]), cost[same], 0.0).sum(axis=1)
        useful.add(int(same[np.lexsort((total, -reach))[0]]))
    return np.array(sorted(useful), dtype=np.int64)
