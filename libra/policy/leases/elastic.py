"""Speed of an action with more cores, which actions get more cores, and which actions are stopped.

An action on more cores ends sooner by ``T (1/v - 1/v')`` but uses ``T (c'/v' - c/v)`` more
core-seconds, because speed ``v`` grows slower than cores ``c``. The time saved must exceed the
extra core-seconds times their price (`Pressure`). Spare cores go to the action that gains most per
core. Differs from ARL-Tangram (3.2): an action that fits is never held back, and a revocable action
may be stopped so that a shorter action begins. ``python -m benchmarks actions`` measures the gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite, log, sqrt
from typing import NamedTuple

from libra.errors import ConfigError
from libra.policy.leases.resources import KINDS, Lease, covers, plus

SAMPLES = 4  # actions of each size that are measured before a measured curve is used
NEWEST = 0.1  # weight of the newest action in a mean, once there are more than its inverse
LEAST_S = 1e-4  # shortest seconds of an action, whose logarithm is averaged


class SpeedUp:
    """A speed curve: (cores, speed) for every legal number of cores; the smallest has speed 1.

    ``declared`` lists the speeds of ``least`` to ``most`` cores, or of some sizes by cores; with
    "measure" sizes double and their speeds are learned. ConfigError for a speed that is not
    positive, is missing, is out of range, or falls as cores are added.
    """

    def __init__(
        self, least: int, most: int, declared: Sequence[float] | Mapping[int, float] | str, where: str = "curve"
    ) -> None:
        self.measured = declared == "measure"
        self._logs: dict[int, tuple[int, float]] = {}
        if self.measured:
            self.sizes = (*(least << k for k in range(most.bit_length()) if least << k < most), most)
            self._speeds = {least: 1.0}
            return
        points = _points(least, most, declared)
        if points is None:
            raise ConfigError(
                f"{where}: elastic is {declared!r}; type a speed above 0 for each of {least} to {most} cores, none below the "
                f"one before, e.g. {[size / least for size in range(least, most + 1)]}, or for some of them, the least among "
                f"them, e.g. {{{least}: 1.0, {most}: {most / least:g}}}, or 'measure'"
            )
        self.sizes = tuple(sorted(points))
        self._speeds = {size: points[size] / points[least] for size in self.sizes}

    @property
    def known(self) -> tuple[int, ...]:
        return tuple(size for size in self.sizes if size in self._speeds)

    def speed(self, cores: int) -> float:
        """Speed of the largest known size up to ``cores``; at least 1."""
        return max((self._speeds[size] for size in self.known if size <= cores), default=1.0)

    def unmeasured(self, free_cores: int) -> int | None:
        """The least-sampled size of at most ``free_cores``; None once all have enough samples."""
        if not self.measured:
            return None
        counts = [(self._logs.get(size, (0, 0.0))[0], size) for size in self.sizes if size <= free_cores]
        count, size = min(counts, default=(SAMPLES, 0))
        return size if count < SAMPLES else None

    def ended(self, cores: int, seconds: float) -> None:
        """Record an action's ``seconds`` on ``cores`` cores; a declared curve does not change."""
        if not self.measured or cores not in self.sizes:
            return
        count, mean = self._logs.get(cores, (0, 0.0))
        value = log(max(LEAST_S, seconds))
        self._logs[cores] = (count + 1, mean + (value - mean) * max(NEWEST, 1 / (count + 1)))
        base = self._logs.get(self.sizes[0], (0, 0.0))
        if base[0] < SAMPLES:
            return
        fastest = 1.0
        self._speeds = {self.sizes[0]: 1.0}
        for size in self.sizes[1:]:
            count, mean = self._logs.get(size, (0, 0.0))
            if count >= SAMPLES:
                fastest = max(fastest, exp(base[1] - mean))
                self._speeds[size] = round(fastest, 9)


def _points(least: int, most: int, declared: Sequence[float] | Mapping[int, float] | str) -> dict[int, float] | None:
    if not isinstance(declared, Mapping):
        if isinstance(declared, str) or len(declared) != most - least + 1:
            return None
        declared = dict(zip(range(least, most + 1), declared, strict=True))
    points = dict(sorted(declared.items()))
    speeds = list(points.values())
    sizes = least in points and all(isinstance(size, int) and least <= size <= most for size in points)
    legal = all(isinstance(speed, int | float) and isfinite(speed) and speed > 0 for speed in speeds)
    return points if sizes and legal and speeds == sorted(speeds) else None


FORGETTING = 0.02  # weight of the newest action in the mean number of cores
MOST_WEIGHT = 0.05  # most weight of the newest arrival in the mean busy share; less with many cores
MOST_WASTE = 2.0  # most core-seconds of a size, relative to the least: forecasts may be wrong
BUSIEST = 0.99  # upper bound of the busy share, so that the price is finite


class Pressure:
    """Load of the cores when actions arrive, and the price of a core-second.

    With ``m`` servers, each busy for a share ``r`` of the time, on average ``L(r) = r^a / (1 - r)``
    actions wait, with ``a = sqrt(2 (m + 1))`` (Sakasegawa, 1977: M/M/m). One more core-second costs
    ``L'(r) / C`` seconds of waiting, with ``C`` cores; a server is the mean cores of an action.
    Each action waiting now waits ``1 / C`` seconds longer.
    """

    def __init__(self) -> None:
        self.busy_frac, self.cores, self._arrivals = 1.0, 1.0, 0

    def came(self, held_cores: int, total_cores: int) -> None:
        frac = held_cores / total_cores if total_cores else 0.0
        self._arrivals += 1
        weight = max(min(MOST_WEIGHT, 0.25 / max(1, total_cores)), 1 / (self._arrivals + 1))
        self.busy_frac = round(self.busy_frac + weight * (frac - self.busy_frac), 9)

    def began(self, cores: int) -> None:
        self.cores = round(self.cores + FORGETTING * (cores - self.cores), 9)

    def price(self, waiting: int, held_cores: int, total_cores: int) -> float:
        """Seconds of waiting per extra core-second, while ``waiting`` actions wait."""
        if not total_cores:
            return 0.0
        busy = min(BUSIEST, max(self.busy_frac, held_cores / total_cores))
        power: float = sqrt(2 * (max(1.0, total_cores / max(1.0, self.cores)) + 1))
        slope: float = power * busy ** (power - 1) / (1 - busy) + busy**power / (1 - busy) ** 2
        return float(max(float(waiting), slope) / total_cores)


class Candidate(NamedTuple):
    """A lease that begins now; ``seconds`` is its expected length with the fewest cores."""

    lease: Lease
    curve: SpeedUp
    seconds: float


def enlarged(
    candidates: list[Candidate], free_cores: dict[str, int], price: float, *, measures: bool
) -> list[tuple[str, int, str]]:
    """(holder, cores, reason) of candidates that get more; ``measures`` allows unmeasured sizes."""
    given: dict[str, tuple[int, str]] = {}
    steps: list[_Step] = []
    for index, each in enumerate(candidates):
        worker, cores = each.lease.worker, each.lease.resources.cores
        size = each.curve.unmeasured(cores + free_cores[worker]) if measures else None
        if size is not None:
            free_cores[worker] -= size - cores
            if size != cores:
                given[each.lease.holder] = size, f"{size} cores, to measure this size"
        elif (step := _step(each, index, cores, free_cores[worker], price)) is not None:
            heapq.heappush(steps, step)
    while steps:
        _, index, size, saved_s = heapq.heappop(steps)
        each = candidates[index]
        worker, had = each.lease.worker, given.get(each.lease.holder, (each.lease.resources.cores, ""))[0]
        if size - had <= free_cores[worker]:
            free_cores[worker] -= size - had
            given[each.lease.holder] = size, f"{size} cores save {saved_s:.3g} s more, at {price:.3g} s per core-second"
            had = size
        if (step := _step(each, index, had, free_cores[worker], price)) is not None:
            heapq.heappush(steps, step)
    return [(each.lease.holder, *given[each.lease.holder]) for each in candidates if each.lease.holder in given]


_Step = tuple[float, int, int, float]  # -gain per core, candidate, size, seconds saved


def _step(each: Candidate, index: int, cores: int, free: int, price: float) -> _Step | None:
    best: _Step | None = None
    now_s = each.seconds / each.curve.speed(cores)
    for size in each.curve.known:
        if not cores < size <= cores + free or size > MOST_WASTE * each.lease.least_cores * each.curve.speed(size):
            continue
        then_s = each.seconds / each.curve.speed(size)
        gain = (now_s - then_s) - price * (size * then_s - cores * now_s)
        if gain > 0 and (best is None or -gain / (size - cores) < best[0]):
            best = (-gain / (size - cores), index, size, now_s - then_s)
    return best


PAYS_FACTOR = 2.0  # the saving must exceed the cost by this factor, since both are forecast
OVERHEAD_S = 0.5  # further seconds to stop an action and begin it again
CORES = KINDS.index("cores")


class Running(NamedTuple):
    holder: str
    worker: str
    has: tuple[int, ...]  # amounts of `KINDS` that it holds
    least: tuple[int, ...]  # that it needs
    left_s: float  # expected; 0: not known, or about to end
    again_s: Callable[[int], float] | None  # in all, by cores, if it is revocable


class Stopped(NamedTuple):
    """``holders`` stop: an action begins ``saved_s`` sooner, at a cost of ``cost_s`` to others."""

    holders: tuple[str, ...]
    worker: str
    saved_s: float
    cost_s: float


def stopped_for(
    need: Sequence[int], seconds: float, free: Mapping[str, Sequence[int]], running: Sequence[Running], price: float
) -> Stopped | None:
    """The actions to stop for one that needs ``need`` for ``seconds``; None if it should wait.

    ``free`` has amounts by `KINDS` of each worker that is large enough but lacks room now.
    ``price`` is seconds of waiting per core-second lost.
    """
    here = {worker: [each for each in running if each.worker == worker] for worker in free}
    waits_s = min((_fits_s(need, free[worker], here[worker]) for worker in free), default=0.0)
    best: Stopped | None = None
    for worker in sorted(free):
        taken = _fewest(need, free[worker], here[worker])
        if not taken:
            continue
        cost_s = _later_s(need, seconds, free[worker], taken) + price * sum(map(_thrown_away, taken))
        if PAYS_FACTOR * cost_s < waits_s and (best is None or cost_s < best.cost_s):
            best = Stopped(tuple(each.holder for each in taken), worker, waits_s, cost_s)
    return best


def _thrown_away(each: Running) -> float:
    assert each.again_s is not None
    return each.has[CORES] * (each.again_s(each.has[CORES]) - each.left_s)


def _fits_s(need: Sequence[int], free: Sequence[int], running: Sequence[Running]) -> float:
    for each in sorted(running, key=lambda each: each.left_s):
        free = plus(free, each.has)
        if covers(free, need):
            return each.left_s
    return 0.0


def _fewest(need: Sequence[int], free: Sequence[int], running: Sequence[Running]) -> list[Running]:
    missing, taken = plus(need, free, -1), list[Running]()
    able = [(each.again_s(each.has[CORES]) - each.left_s, each) for each in running if each.again_s is not None]
    for _, each in sorted(able, key=lambda pair: (pair[0], pair[1].holder)):
        if any(m > 0 and has > 0 for m, has in zip(missing, each.has, strict=True)):
            taken.append(each)
            missing = plus(missing, each.has, -1)
    if any(m > 0 for m in missing):
        return []
    for each in list(taken):
        without = plus(missing, each.has)
        if all(m <= 0 for m in without):
            taken.remove(each)
            missing = without
    return taken


def _later_s(need: Sequence[int], seconds: float, free: Sequence[int], taken: Sequence[Running]) -> float:
    left = plus(free, need, -1)
    for each in taken:
        left = plus(left, each.has)
    later_s = 0.0
    for each in taken:
        assert each.again_s is not None
        fits, cores = covers(left, each.least), each.has[CORES]
        if fits:
            cores = min(cores, left[CORES])
            left = plus(left, each.least, -1)
            left[CORES] -= cores - each.least[CORES]
        later_s += OVERHEAD_S + (0.0 if fits else seconds) + each.again_s(cores) - each.left_s
    return later_s
