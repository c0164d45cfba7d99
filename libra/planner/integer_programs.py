"""The planner's integer programs, solved by HiGHS through cvxpy. With u = 1/T and q = (share of a class on a kind)/T they
are linear.

    fluid    max u   over engines n_k (whole) and rates q_kc:   sum_c load_kc q_kc <= n_k,   sum_k q_kc = u,   sum_k tp_k n_k <= F
    priced   max u   over engines n_k (whole):                  sum_k price_km n_k >= due_m u  for every cut m, same F
    whole    min T   over engines and 0/1 assignments of single trajectories to single engines

Every time is in units that the caller chooses near 1, which is what the solver's absolute tolerances assume.

Classes hold trajectories whose loads on the kinds have similar *ratios*, not lengths, so that an integer
program covers thousands: within a class, twice the load counts twice, which is exact for a fluid program.
At prices p of an engine of each kind, trajectory i costs at least pi_i = min over its allowed kinds of
p_k load_s[k, i] / T per second of rollout, on any engine. Hence p . engines >= (sum of pi_i) / T for every
layout: a cut, which holds for the trajectories themselves. The classes only suggest p.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from libra.errors import PlanError
from libra.planner.engine_packing import cheapest_kinds
from libra.planner.planning_problem import Floats, Ints, Problem

MAX_NODES = 500
"""Nodes of the program that chooses engines for classes: its solution suggests prices, and is not a bound."""
WHOLE_LIMIT_S = 20.0
"""Seconds after which HiGHS gives its best assignment of whole trajectories so far, if it has one."""
RATIO_SPREAD = 2e-4
"""Classes whose ratios differ by at most this, relatively, are not split."""
RATE_GAP = 1e-6
"""Relative gap at which HiGHS stops; every bound taken from a program allows for it."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Constraints on the number of engines of each kind (K,).

    All engines together have at most ``num_gpus`` GPUs; of the degrees in ``fixed`` there are exactly so many. Each row of
    ``cover`` (S, K) is a set of kinds that needs at least one engine: some trajectory can run on no other.
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


def solve_fluid(load: Floats, allowed: NDArray[np.bool_], pools: Pools) -> Ints | None:
    """Best whole number of engines of each kind (K,) for classes (K, C) that may be divided at will; None if none will do."""
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
    if not _solve(problem, mip_rel_gap=RATE_GAP * 10, mip_max_nodes=MAX_NODES) or rate.value is None or rate.value <= 0:
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


def solve_whole(load: Floats, alone: Floats, pools: Pools, below: float) -> Whole | None:
    """The best assignment of whole trajectories (K, N) to whole engines that ends before ``below``; None if there is none."""
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
    if not _solve(problem, mip_rel_gap=1e-9, mip_abs_gap=1e-9, time_limit=WHOLE_LIMIT_S) or on.value is None:
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


def ratio_classes(load_s: Floats, allowed: NDArray[np.bool_], max_classes: int) -> Ints:
    """Class of each trajectory, (N,), from 0 without holes.

    Parameters
    ----------
    load_s, allowed : arrays (K, N)
        Engine-seconds, and which kinds each trajectory may be on; a class has one such set.
    max_classes : int
        No class is split once there are this many (another set of allowed kinds still adds one).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(allowed, np.log(np.maximum(load_s, 1e-300)), 0.0)
    weight = np.exp(logs.max(axis=0, initial=-700.0, where=allowed))
    logs = logs - logs.sum(axis=0) / np.maximum(allowed.sum(axis=0), 1)
    _, pattern = np.unique(allowed, axis=1, return_inverse=True)
    pattern = pattern.reshape(-1)
    parts = [np.flatnonzero(pattern == number) for number in range(int(pattern.max()) + 1)]
    widths = [_widest(logs, allowed, part) for part in parts]
    while len(parts) < max_classes:
        gains = [
            width * float(weight[part].sum()) if width > RATIO_SPREAD else 0.0
            for part, (width, _) in zip(parts, widths, strict=True)
        ]
        worst = int(np.argmax(gains))
        if gains[worst] <= 0:
            break
        part, (_, axis) = parts[worst], widths[worst]
        values = logs[axis, part]
        low = values <= (values.min() + values.max()) / 2
        parts[worst : worst + 1] = [part[low], part[~low]]
        widths[worst : worst + 1] = [_widest(logs, allowed, part[low]), _widest(logs, allowed, part[~low])]
    class_of = np.zeros(load_s.shape[1], dtype=np.int64)
    for number, part in enumerate(parts):
        class_of[part] = number
    return class_of


def _widest(logs: Floats, allowed: NDArray[np.bool_], part: Ints) -> tuple[float, int]:
    """The largest difference of a part's log ratios over the kinds, and the kind that has it."""
    values = logs[:, part]
    width = np.where(allowed[:, part[0]], values.max(axis=1) - values.min(axis=1), 0.0)
    return float(width.max()), int(width.argmax())


MAX_CLASSES = 40
"""Classes of the program that chooses the engines. More classes improve the prices; the bounds hold with any number."""


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """The solution over classes for given engines: a cut, and a kind for each trajectory (N,) that balances the engines.

    ``binning_frac``: relative difference of the classes' time of these engines from the unbinned bound at the same prices.
    """

    cut: Cut
    binning_frac: float
    kinds: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Trajectories grouped by the kinds they may run on within a threshold, and by ratio of loads.

    ``load`` (K, N) is in the program's unit of time, 0 where not ``allowed``; ``class_load`` (K, C) sums it over each class.
    The choice of engines is restricted to ``useful`` kinds, to keep that program small; cuts cover all kinds.
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
    """Kinds that are cheapest for a trajectory, or cheapest in total among kinds of their degree; up to eight are all kept."""
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
