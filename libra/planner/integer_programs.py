"""The planner's integer programs, solved by HiGHS through cvxpy. With u = 1/T and q = (share of a class on a kind)/T they
are linear.

    fluid    max u   over engines n_k (whole) and rates q_kc:   sum_c load_kc q_kc <= n_k,   sum_k q_kc = u,   sum_k tp_k n_k <= F
    priced   max u   over engines n_k (whole):                  sum_k price_km n_k >= due_m u  for every cut m, same F
    whole    min T   over engines and 0/1 assignments of single trajectories to single engines

Every time is in units that the caller chooses near 1, which is what the solver's absolute tolerances assume.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.planning_problem import Floats, Ints

RATE_GAP = 1e-6
"""Relative gap at which HiGHS stops; every bound taken from a program allows for it."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Constraints on the number of engines of each kind.

    Attributes
    ----------
    tp : int array (K,)
    num_gpus : int
        Upper bound on the GPUs of all engines together.
    fixed : mapping of TP degree to number
        Exactly this many engines of that degree.
    cover : bool array (S, K)
        At least one engine of each of these sets of kinds: some trajectory can run on no other.
    """

    tp: Ints
    num_gpus: int
    fixed: Mapping[int, int]
    cover: NDArray[np.bool_] | None = None

    def holds(self, engines: Any) -> list[Any]:
        """The constraints on a cvxpy expression ``engines`` (K,)."""
        rows = [self.tp @ engines <= self.num_gpus, engines >= 0]
        for degree, number in self.fixed.items():
            rows.append((self.tp == degree).astype(float) @ engines == number)
        if self.cover is not None:
            rows.append(self.cover.astype(float) @ engines >= 1)
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """``price`` (K,) . engines >= ``due`` * u holds for every layout: a lower bound of the trajectories' cost at these
    prices."""

    price: Floats
    due: float


def solve_fluid(load: Floats, allowed: NDArray[np.bool_], pools: Pools, max_nodes: int = 500) -> Ints | None:
    """Best whole number of engines of each kind (K,) for classes that may be divided at will; None if none will do.

    ``load`` and ``allowed`` are (K, C). The search stops after ``max_nodes``; its value is then not a bound, and is not
    used as one.
    """
    import cvxpy as cp

    load = np.where(allowed, load, 0.0)
    engines = cp.Variable(len(pools.tp), integer=True)
    rates = cp.Variable(load.shape, nonneg=True)
    rate = cp.Variable()
    rows = [
        cp.sum(cp.multiply(load, rates), axis=1) <= engines,
        cp.sum(cp.multiply(allowed.astype(float), rates), axis=0) == rate,
        *pools.holds(engines),
    ]
    problem = cp.Problem(cp.Maximize(rate), rows)
    if not _solve(problem, mip_rel_gap=RATE_GAP * 10, mip_max_nodes=max_nodes) or rate.value is None or rate.value <= 0:
        return None
    whole: Ints = np.rint(np.asarray(engines.value)).astype(np.int64)
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """The fluid program's solution for given engines: rate, price of an engine of each kind (K,), shares (K, C).

    Kinds without an engine have price 0 here.
    """

    rate: float
    price: Floats
    shares: Floats


def solve_prices(load: Floats, allowed: NDArray[np.bool_], engines: Ints) -> Prices | None:
    """The fluid program with these engines (K,); None if no engine may take a class."""
    import cvxpy as cp

    have = np.flatnonzero(engines > 0)
    if not allowed[have].any(axis=0).all():
        return None
    may = allowed[have].astype(float)
    rates = cp.Variable(may.shape, nonneg=True)
    rate = cp.Variable()
    loads = cp.sum(cp.multiply(np.where(allowed[have], load[have], 0.0), rates), axis=1) <= engines[have].astype(float)
    sums = cp.sum(cp.multiply(may, rates), axis=0) == rate
    if not _solve(cp.Problem(cp.Maximize(rate), [loads, sums])) or rate.value is None or rate.value <= 0:
        return None
    price, shares = np.zeros(len(engines)), np.zeros(load.shape)
    price[have] = np.abs(loads.dual_value)
    part = np.maximum(np.asarray(rates.value), 0.0) * may
    shares[have] = part / np.maximum(part.sum(axis=0), 1e-300)
    return Prices(float(rate.value), price, shares)


def solve_priced(cuts: Sequence[Cut], pools: Pools) -> tuple[float, Ints] | None:
    """The largest rate that no cut excludes, which is an upper bound of every layout's, and engines (K,) that reach it."""
    import cvxpy as cp

    engines = cp.Variable(len(pools.tp), integer=True)
    rate = cp.Variable()
    rows = [cut.price @ engines >= cut.due * rate for cut in cuts]
    if not _solve(cp.Problem(cp.Maximize(rate), rows + pools.holds(engines)), mip_rel_gap=RATE_GAP):
        return None
    if rate.value is None or not np.isfinite(rate.value):
        return None
    return float(rate.value) * (1 + RATE_GAP), np.rint(np.asarray(engines.value)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Solution of the program over single trajectories: kind of each engine slot (E,), and slot of each trajectory (N,).

    ``proven``: it is optimal; else it is the best found within the limit.
    """

    kind_of: Ints
    engine_of: Ints
    proven: bool


def solve_whole(load: Floats, alone: Floats, pools: Pools, below: float, limit_s: float = 20.0) -> Whole | None:
    """The best assignment of whole trajectories to whole engines that ends before ``below``; None if there is none.

    Parameters
    ----------
    load, alone : float arrays (K, N)
    below : float
        Only pairs that finish before it are considered.
    limit_s : float
        Seconds after which HiGHS gives its best so far, if it has one.
    """
    import cvxpy as cp

    num_items = load.shape[1]
    least = np.maximum(load, alone)
    slots = [k for k, tp in enumerate(pools.tp) for _ in range(min(int(pools.num_gpus // tp), num_items))]
    slots = [k for k in slots if (least[k] < below).any()]
    if not slots:
        return None
    kind_of = np.array(slots, dtype=np.int64)
    rank = np.array([slots[:j].count(k) for j, k in enumerate(slots)])
    allowed = (least[kind_of] < below) & (rank[:, None] <= np.arange(num_items)[None, :])
    if not allowed.any(axis=0).all():
        return None
    on = cp.Variable(allowed.shape, boolean=True)
    used = cp.Variable(len(slots), boolean=True)
    last = cp.Variable()
    rows = [
        on <= allowed.astype(float),
        cp.sum(on, axis=0) == 1,
        on <= cp.reshape(used, (len(slots), 1), order="C") @ np.ones((1, num_items)),
        cp.sum(cp.multiply(np.where(allowed, load[kind_of], 0.0), on), axis=1) <= last,
        cp.sum(cp.multiply(np.where(allowed, least[kind_of], 0.0), on), axis=0) <= last,
        last <= below,
        _engine_numbers(pools, kind_of, used),
    ]
    rows = [row for group in rows for row in (group if isinstance(group, list) else [group])]
    for j in range(1, len(slots)):
        if slots[j] == slots[j - 1]:
            rows.append(used[j] <= used[j - 1])
    problem = cp.Problem(cp.Minimize(last), rows)
    if not _solve(problem, mip_rel_gap=1e-9, mip_abs_gap=1e-9, time_limit=limit_s) or on.value is None:
        return None
    return Whole(kind_of, np.argmax(on.value, axis=0), problem.status == "optimal")


def _engine_numbers(pools: Pools, kind_of: Ints, used: Any) -> list[Any]:
    """GPUs of the engines in use, and of those that are fixed whether in use or not."""
    fixed = np.isin(pools.tp[kind_of], list(pools.fixed))
    free_gpus = pools.num_gpus - sum(degree * number for degree, number in pools.fixed.items())
    rows = [np.where(fixed, 0, pools.tp[kind_of]) @ used <= free_gpus]
    rows += [
        (pools.tp[kind_of] == degree).astype(float) @ used <= number
        for degree, number in pools.fixed.items()
        if (pools.tp[kind_of] == degree).any()
    ]
    return rows


def _solve(problem: Any, **options: Any) -> bool:
    """Whether HiGHS found a solution; PlanError if it failed for a reason other than infeasibility."""
    import cvxpy as cp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # "may be inaccurate": a limit was reached, which callers expect
            problem.solve(solver=cp.HIGHS, **options)
    except cp.error.SolverError as error:
        raise PlanError(
            f"HiGHS failed on a program of {problem.size_metrics.num_scalar_variables} variables: {error}"
        ) from error
    return str(problem.status) in ("optimal", "optimal_inaccurate", "user_limit")
