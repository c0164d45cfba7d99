"""Speed of an action with more cores, which actions get more, and which are stopped.

Spare cores are given one size at a time, each time to the action that gains most seconds per core.
A size must pay off: an action on more cores ends sooner by ``T (1/v - 1/v')``, but holds ``T (c'/v'
- c/v)`` core-seconds more, because speeds ``v`` rise slower than cores ``c``. So

    T (1/v - 1/v')  >  p x T (c'/v' - c/v)

where the price ``p`` is the waiting that a core-second more causes for all others (`Pressure`).
ARL-Tangram (3.2) also evicts the last admitted action if the others then gain more; here an action
that fits is never held back.

A revocable action may be stopped so that a shorter one can begin. The cost is the seconds by which
the stopped ones end later, and the longer wait of everybody for cores; the saving is the wait of
the short one. Both are known only for tools whose actions have ended. ARL-Tangram never stops an
action; `python -m benchmarks actions` measures the gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite, log, sqrt
from typing import NamedTuple

from libra.errors import ConfigError
from libra.policy.leases.resources import KINDS

SAMPLES = 4  # actions of each size that are measured before a measured curve is used
NEWEST = 0.1  # weight of the newest action in a mean, once there are more than its inverse
LEAST_S = 1e-4  # shortest seconds of an action, whose logarithm is averaged


class SpeedUp:
    """A curve: (cores, speed) for every legal number of cores, the least first with speed 1.

    ``declared`` has speeds of ``least`` to ``most`` cores, or of some sizes by cores, or "measure":
    sizes are doubled and their speeds learned. ConfigError if a speed is not above 0 or falls as
    cores are added, or a size is missing or out of range.
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
        """The size of at most ``free_cores`` with the fewest samples, while they are too few."""
        if not self.measured:
            return None
        counts = [(self._logs.get(size, (0, 0.0))[0], size) for size in self.sizes if size <= free_cores]
        count, size = min(counts, default=(SAMPLES, 0))
        return size if count < SAMPLES else None

    def ended(self, cores: int, seconds: float) -> None:
        """An action with ``cores`` cores took ``seconds``; a declared curve does not change."""
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
    """Speeds by cores as they are declared, if they make sense."""
    if isinstance(declared, str) or (not isinstance(declared, Mapping) and len(declared) != most - least + 1):
        return None
    points = (
        dict(declared) if isinstance(declared, Mapping) else dict(zip(range(least, most + 1), declared, strict=True))
    )
    if least not in points or not all(isinstance(size, int) and least <= size <= most for size in points):
        return None
    speeds = [points[size] for size in sorted(points)]
    if not all(isinstance(speed, int | float) and isfinite(speed) and speed > 0 for speed in speeds):
        return None
    return points if speeds == sorted(speeds) else None


FORGETTING = 0.02  # weight of the newest action in the mean number of cores
MOST_WEIGHT = 0.05  # most weight of the newest arrival in the mean busy share; less with many cores
MOST_WASTE = 2.0  # most core-seconds of a size, relative to the least: forecasts may be wrong
BUSIEST = 0.99  # upper bound of the busy share, so that the price is finite


class Pressure:
    """Load of the cores as actions come, and the price of a core-second.

    With ``m`` servers, each busy for a share ``r`` of the time, a mean of ``L(r) = r^a / (1 - r)``
    actions waits, with ``a = sqrt(2 (m + 1))`` (Sakasegawa, 1977: M/M/m). A core-second more costs
    ``L'(r) / C`` seconds of waiting, with ``C`` cores; a server is the mean cores of an action.
    Each action of a present line waits ``1 / C`` seconds longer.
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
        """Seconds of waiting for a core-second more, while ``waiting`` actions wait."""
        if not total_cores:
            return 0.0
        busy = min(BUSIEST, max(self.busy_frac, held_cores / total_cores))
        power: float = sqrt(2 * (max(1.0, total_cores / max(1.0, self.cores)) + 1))
        slope: float = power * busy ** (power - 1) / (1 - busy) + busy**power / (1 - busy) ** 2
        return float(max(float(waiting), slope) / total_cores)


class Candidate(NamedTuple):
    """An action that begins now; ``seconds``: expected with its least cores."""

    holder: str
    worker: str
    cores: int
    least: int
    curve: SpeedUp
    seconds: float


def enlarged(
    candidates: list[Candidate], free_cores: dict[str, int], price: float, *, measures: bool
) -> list[tuple[str, int, str]]:
    """(holder, cores, reason) of candidates that get more; ``free_cores`` fall accordingly.

    ``measures``: sizes whose speed is not known yet are given, too.
    """
    given: dict[str, tuple[int, str]] = {}
    steps: list[tuple[float, int, int, float]] = []  # heap: -gain per core, candidate, size, saved
    for index, each in enumerate(candidates):
        free = free_cores[each.worker]
        size = each.curve.unmeasured(each.cores + free) if measures else None
        if size is not None:
            free_cores[each.worker] = free - (size - each.cores)
            given[each.holder] = size, f"{size} cores, to measure this size"
        elif (step := _step(each, index, each.cores, free, price)) is not None:
            heapq.heappush(steps, step)
    while steps:
        _, index, size, saved_s = heapq.heappop(steps)
        each = candidates[index]
        had = given.get(each.holder, (each.cores, ""))[0]
        if size - had <= free_cores[each.worker]:
            free_cores[each.worker] -= size - had
            given[each.holder] = size, f"{size} cores save {saved_s:.3g} s more, at {price:.3g} s per core-second"
            had = size
        if (step := _step(each, index, had, free_cores[each.worker], price)) is not None:
            heapq.heappush(steps, step)
    return [
        (each.holder, *given[each.holder])
        for each in candidates
        if given.get(each.holder, (each.cores,))[0] != each.cores
    ]


def _step(each: Candidate, index: int, cores: int, free: int, price: float) -> tuple[float, int, int, float] | None:
    """The larger size that gains most per core, of at most ``free`` more."""
    best: tuple[float, int, int, float] | None = None
    now_s = each.seconds / each.curve.speed(cores)
    for size in each.curve.known:
        if not cores < size <= cores + free or size > MOST_WASTE * each.least * each.curve.speed(size):
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
    """An action that holds a lease."""

    holder: str
    worker: str
    has: tuple[int, ...]  # amounts of `KINDS` that it holds
    least: tuple[int, ...]  # that it needs
    left_s: float  # expected; 0: not known, or about to end
    again_s: Callable[[int], float] | None  # in all, by cores, if it is revocable


class Stopped(NamedTuple):
    """``holders`` stop: one begins ``saved_s`` sooner, which costs others ``cost_s``."""

    holders: tuple[str, ...]
    worker: str
    saved_s: float
    cost_s: float


def stopped_for(
    need: tuple[int, ...], seconds: float, free: Mapping[str, Sequence[int]], running: Sequence[Running], price: float
) -> Stopped | None:
    """Who makes room for an action that takes ``need`` for ``seconds``; None if it should wait.

    ``free``: amounts of `KINDS` of each worker that is large enough; it fits on none now.
    ``price``: seconds of waiting for each core-second that is thrown away.
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


def _fits_s(need: tuple[int, ...], free: Sequence[int], running: Sequence[Running]) -> float:
    """Seconds until it fits there, as actions end by themselves."""
    left = list(free)
    for each in sorted(running, key=lambda each: each.left_s):
        left = [amount + more for amount, more in zip(left, each.has, strict=True)]
        if all(has >= want for has, want in zip(left, need, strict=True)):
            return each.left_s
    return 0.0


def _fewest(need: tuple[int, ...], free: Sequence[int], running: Sequence[Running]) -> list[Running]:
    """Those that ran for the shortest time and together make room, without superfluous ones."""
    missing = [want - has for want, has in zip(need, free, strict=True)]
    taken: list[Running] = []
    able = [(each.again_s(each.has[CORES]) - each.left_s, each) for each in running if each.again_s is not None]
    for _, each in sorted(able, key=lambda pair: (pair[0], pair[1].holder)):
        if any(m > 0 and has > 0 for m, has in zip(missing, each.has, strict=True)):
            taken.append(each)
            missing = [m - has for m, has in zip(missing, each.has, strict=True)]
    if any(m > 0 for m in missing):
        return []
    for each in list(taken):
        without = [m + has for m, has in zip(missing, each.has, strict=True)]
        if all(m <= 0 for m in without):
            taken.remove(each)
            missing = without
    return taken


def _later_s(need: tuple[int, ...], seconds: float, free: Sequence[int], taken: Sequence[Running]) -> float:
    left = [has - want for has, want in zip(free, need, strict=True)]
    for each in taken:
        left = [amount + has for amount, has in zip(left, each.has, strict=True)]
    later_s = 0.0
    for each in taken:
        assert each.again_s is not None
        fits = all(has >= want for has, want in zip(left, each.least, strict=True))
        cores = min(each.has[CORES], left[CORES]) if fits else each.has[CORES]
        if fits:
            left = [has - want for has, want in zip(left, each.least, strict=True)]
            left[CORES] -= cores - each.least[CORES]
        later_s += OVERHEAD_S + (0.0 if fits else seconds) + each.again_s(cores) - each.left_s
    return later_s
