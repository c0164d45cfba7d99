"""The planner's integer programs, solved by HiGHS through cvxpy; imported only where needed.

With u = 1/T and q = (share of a class on a kind)/T they are linear::

  fluid   max u  over whole engines n_k and rates q_kc:
                 sum_c load_kc q_kc <= n_k,  sum_k q_kc = u,  sum_k tp_k n_k <= F
  priced  max u  over whole engines n_k:
                 sum_k price_km n_k >= due_m u  for every cut m,  sum_k tp_k n_k <= F
  whole   min T  over engines and 0/1 assignments of single trajectories to single engines

At engine prices p, trajectory i costs at least pi_i = min over its allowed kinds of p_k load_s[k,
i] / T per second of rollout. Hence p . engines >= (sum of pi_i) / T for every layout: a cut that
holds for single trajectories. Classes only suggest p: they join trajectories with similar load
*ratios*, which is exact for a fluid program.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.planning_problem import Floats, Ints, Problem

MAX_NODES = 500
"""Node limit of the program that chooses engines for classes, whose result is no bound."""
WHOLE_LIMIT_S = 20.0
"""Time limit of HiGHS for whole trajectories; its best assignment so far is used, if any."""
RATIO_SPREAD = 2e-4
"""Minimum width of a class, in the logarithm of its load ratios."""
MAX_CLASSES = 100
"""Classes in the program that chooses engines: more improve the prices; bounds hold with any number."""
RATE_GAP = 1e-6
"""Relative gap at which HiGHS stops; bounds taken from a program allow for this gap."""


class Pools(NamedTuple):
    """Engine constraints by kind (K,): total GPUs, and exact counts of ``fixed`` degrees."""

    tp: Ints
    num_gpus: int
    fixed: Mapping[int, int]

    def rows(self, engines: Any) -> list[Any]:
        """The constraints on ``engines`` (K,), a cvxpy expression."""
        fixed = [(self.tp == tp).astype(float) @ engines == number for tp, number in self.fixed.items()]
        return [self.tp @ engines <= self.num_gpus, engines >= 0, *fixed]


class Cut(NamedTuple):
    """``price`` (K,) . engines >= ``due`` * u, which holds for every layout."""

    price: Floats
    due: float


class Priced(NamedTuple):
    """Class solution for given engines: a cut, and a balanced kind for each trajectory (N,).

    ``binning_frac`` is the relative difference between the classes' time and the unbinned bound.
    """

    cut: Cut
    binning_frac: float
    kinds: Ints


def _solved(goal: Any, rows: list[Any], **options: Any) -> bool:
    """Whether HiGHS proved optimality; PlanError if it failed."""
    program = cp.Problem(goal, rows)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # "may be inaccurate": a limit was reached, which callers handle
            solve: Any = program.solve
            solve(solver=cp.HIGHS, **options)
    except cp.error.SolverError as error:
        raise PlanError(
            f"HiGHS failed on a program of {program.size_metrics.num_scalar_variables} variables: {error}"
        ) from error
    return bool(program.status == "optimal")


def _fluid(load: Floats, allowed: NDArray[np.bool_], engines: Any) -> tuple[Any, Any, list[Any]]:
    """Rate, rates (K, C) and constraints of the fluid program, the engines' load first."""
    rates, rate = cp.Variable(load.shape, nonneg=True), cp.Variable()
    shares = cp.sum(cp.multiply(allowed.astype(float), rates), axis=0) == rate
    return rate, rates, [cp.sum(cp.multiply(load, rates), axis=1) <= engines, shares]


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Trajectories grouped by the kinds allowed within a threshold and by load ratios.

    ``load`` (K, N) is in the program's time unit, 0 where not ``allowed``; ``class_load`` (K, C)
    sums it.
    """

    pools: Pools
    load: Floats
    allowed: NDArray[np.bool_]
    class_of: Ints
    class_load: Floats
    class_allowed: NDArray[np.bool_]

    @classmethod
    def within(cls, problem: Problem, pools: Pools, theta_s: float, unit_s: float) -> Self | None:
        """Classes over pairs that finish alone within ``theta_s``; None if a trajectory has no such pair."""
        allowed = problem.least_s <= theta_s
        if not allowed.any(axis=0).all():
            return None
        load = np.where(allowed, problem.load_s, 0.0) / unit_s
        class_of = ratio_classes(load, allowed)
        _, first = np.unique(class_of, return_index=True)
        sums: Floats = np.stack([np.bincount(class_of, weights=row) for row in load]).astype(np.float64)
        return cls(pools, load, allowed, class_of, sums, allowed[:, first])

    def cut_at(self, price: Floats) -> Cut:
        """Cut at these prices (K,), over single trajectories."""
        cost = np.where(self.allowed, price[:, None] * self.load, np.inf)
        return Cut(price, float(cost.min(axis=0).sum()))

    def first_cuts(self) -> list[Cut]:
        """Cuts at GPU prices: over all kinds, and over the only kinds of some trajectories."""
        only = np.unique(self.class_allowed.T, axis=0)
        return [
            self.cut_at(self.pools.tp.astype(float)),
            *(self.cut_at(self.pools.tp * kinds) for kinds in only if not kinds.all()),
        ]

    def engines(self) -> Ints | None:
        """Best number of engines of each kind (K,) for the classes; None if infeasible."""
        engines = cp.Variable(len(self.pools.tp), integer=True)
        rate, _, rows = _fluid(self.class_load, self.class_allowed, engines)
        _solved(cp.Maximize(rate), rows + self.pools.rows(engines), mip_rel_gap=RATE_GAP * 10, mip_max_nodes=MAX_NODES)
        return None if rate.value is None or rate.value <= 0 else _whole(engines)

    def price(self, engines: Ints) -> Priced | None:
        """Prices and a balanced assignment for these engines (K,); None if infeasible."""
        have = engines > 0
        if not self.class_allowed[have].any(axis=0).all():
            return None
        rate, rates, rows = _fluid(self.class_load[have], self.class_allowed[have], engines[have].astype(float))
        _solved(cp.Maximize(rate), rows)
        if rate.value is None or rate.value <= 0:
            return None
        price = np.abs(rows[0].dual_value)
        part = np.maximum(np.asarray(rates.value), 0.0) * self.class_allowed[have]
        value = np.where(self.allowed[have], price[:, None] * self.load[have], np.inf).min(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(self.allowed & (self.load > 0), value / self.load, 0.0).max(axis=1)
        worth[have] = price
        cut = self.cut_at(worth)
        unbinned = cut.due / max(float(price @ engines[have]), 1e-300)
        shares = np.zeros(self.class_load.shape)
        shares[have] = part / np.maximum(part.sum(axis=0), 1e-300)
        return Priced(cut, abs(1 / (float(rate.value) * unbinned) - 1), self._apart(shares))

    def bound(self, cuts: Sequence[Cut]) -> tuple[float, Ints] | None:
        """Upper bound on the rate of every layout by all cuts, and engines (K,) that reach it."""
        engines, rate = cp.Variable(len(self.pools.tp), integer=True), cp.Variable()
        rows = [cut.price @ engines >= cut.due * rate for cut in cuts]
        _solved(cp.Maximize(rate), rows + self.pools.rows(engines), mip_rel_gap=RATE_GAP)
        if rate.value is None or not np.isfinite(rate.value):
            return None
        return float(rate.value) * (1 + RATE_GAP), _whole(engines)

    def _apart(self, shares: Floats) -> Ints:
        """A kind for each trajectory that approximates ``shares`` (K, C) of each class."""
        kinds = np.zeros(len(self.class_of), dtype=np.int64)
        for number, share in enumerate(shares.T):
            mine, on = np.flatnonzero(self.class_of == number), np.flatnonzero(share > 1e-9)
            weight = self.load[on][:, mine].mean(axis=0)
            left = share[on] * weight.sum()
            for at in np.argsort(-weight, kind="stable"):
                best = int(left.argmax())
                kinds[mine[at]] = on[best]
                left[best] -= weight[at]
        return kinds


def _whole(engines: Any) -> Ints:
    whole: Ints = np.rint(np.asarray(engines.value)).astype(np.int64)
    return whole


def ratio_classes(load: Floats, allowed: NDArray[np.bool_]) -> Ints:
    """(N,) class of each trajectory: equal allowed kinds, similar load ratios."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(allowed, np.log(np.maximum(load, 1e-300)), 0.0)
    ratios = np.where(allowed, logs - logs.sum(axis=0) / np.maximum(allowed.sum(axis=0), 1), 0.0)
    patterns, width = len(np.unique(allowed, axis=1).T), RATIO_SPREAD
    while True:
        cells = np.vstack([allowed, np.floor(ratios / width)])
        found, class_of = np.unique(cells, axis=1, return_inverse=True)
        if len(found.T) <= MAX_CLASSES + patterns or width > 1e3:
            return np.asarray(class_of.reshape(-1), dtype=np.int64)
        width *= 1.5


class Whole(NamedTuple):
    """Kind of each engine slot (E,), slot of each trajectory (N,), and proof of optimality."""

    kind_of: Ints
    engine_of: Ints
    proven: bool


def solve_whole(load: Floats, alone: Floats, pools: Pools, below: float) -> Whole | None:
    """The best assignment of whole trajectories to engines that ends before ``below``, or None.

    ``load`` and ``alone`` are (K, N).
    """
    num_items, least = load.shape[1], np.maximum(load, alone)
    counts = [
        min(int(pools.num_gpus // tp), num_items) * bool((least[k] < below).any()) for k, tp in enumerate(pools.tp)
    ]
    kind_of: Ints = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    allowed = (least[kind_of] < below) & (rank[:, None] <= np.arange(num_items)[None, :])
    if not allowed.any(axis=0).all():
        return None
    on, used, last = cp.Variable(allowed.shape, boolean=True), cp.Variable(len(kind_of), boolean=True), cp.Variable()
    tp = pools.tp[kind_of]
    free_gpus = pools.num_gpus - sum(degree * number for degree, number in pools.fixed.items())
    rows = [
        on <= allowed.astype(float),
        cp.sum(on, axis=0) == 1,
        on <= cp.reshape(used, (len(kind_of), 1), order="C") @ np.ones((1, num_items)),
        cp.sum(cp.multiply(np.where(allowed, load[kind_of], 0.0), on), axis=1) <= last,
        cp.sum(cp.multiply(np.where(allowed, least[kind_of], 0.0), on), axis=0) <= last,
        last <= below,
        np.where(np.isin(tp, list(pools.fixed)), 0, tp) @ used <= free_gpus,  # fixed engines count even if idle
        *((tp == degree).astype(float) @ used <= number for degree, number in pools.fixed.items() if degree in tp),
        *(used[j] <= used[j - 1] for j in np.flatnonzero(np.diff(kind_of, prepend=-1) == 0)),
    ]
    proven = _solved(cp.Minimize(last), rows, mip_rel_gap=1e-9, mip_abs_gap=1e-9, time_limit=WHOLE_LIMIT_S)
    return None if on.value is None else Whole(kind_of, np.argmax(on.value, axis=0), proven)
