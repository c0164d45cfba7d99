"""Which actions are stopped, and begun again later, so that one that waits can begin.

An action that was declared revocable may be stopped, which throws away what it has done. That pays where a short action waits
behind long ones that have only begun, above all where one can go on beside it with fewer cores. What it costs is the seconds by
which the stopped ones end later: those they have run, those they wait for the short one unless they fit beside it, and those that
fewer cores take longer; and what everybody who waits for cores waits longer, for the core-seconds that are thrown away. What it
saves is the seconds that the short one waits, as far as actions of these tools have told how long they take; where they have not,
nothing is stopped.

Differs from ARL-Tangram (3.2), which never stops an action; `python -m benchmarks actions` has what it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from libra.policy.leases.resources import KINDS

PAYS_FACTOR = 2.0
"""What is saved must be more than so many times what it costs, since both are forecast from means of ended actions."""
OVERHEAD_S = 0.5
"""Seconds that stopping an action and beginning it again takes besides."""
_CORES = KINDS.index("cores")


class Running(NamedTuple):
    """An action that holds a lease.

    Attributes
    ----------
    holder, worker : str
    has, least : tuple of int
        Amounts of `KINDS` that it holds, and that it needs.
    left_s : float
        Seconds until it is expected to end; 0: not known, or about to end.
    again_s : callable or None
        Seconds that it takes from its beginning, by cores; None: it is not to be stopped.
    """

    holder: str
    worker: str
    has: tuple[int, ...]
    least: tuple[int, ...]
    left_s: float
    again_s: Callable[[int], float] | None


class Stopped(NamedTuple):
    """Who is stopped on ``worker``: the action that waits begins ``saved_s`` seconds sooner, which costs all others ``cost_s``."""

    holders: tuple[str, ...]
    worker: str
    saved_s: float
    cost_s: float


def stopped_for(
    need: tuple[int, ...], seconds: float, free: Mapping[str, Sequence[int]], running: Sequence[Running], price: float
) -> Stopped | None:
    """Who makes room for an action that takes ``need`` for ``seconds``; None: it is better to wait.

    ``need`` and ``free`` are amounts of `KINDS`. ``free``: of each worker that is large enough and may have the action, which fits
    on none of them now. ``price``: seconds that all who wait for cores wait longer, together, for each core-second that is thrown
    away.
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
    """Core-seconds that it has run."""
    assert each.again_s is not None
    return each.has[_CORES] * (each.again_s(each.has[_CORES]) - each.left_s)


def _fits_s(need: tuple[int, ...], free: Sequence[int], running: Sequence[Running]) -> float:
    """Seconds until it fits there, as actions end by themselves."""
    left = list(free)
    for each in sorted(running, key=lambda each: each.left_s):
        left = [amount + more for amount, more in zip(left, each.has, strict=True)]
        if all(has >= want for has, want in zip(left, need, strict=True)):
            return each.left_s
    return 0.0


def _fewest(need: tuple[int, ...], free: Sequence[int], running: Sequence[Running]) -> list[Running]:
    """Those that have run for the shortest time and together make room, without any that is not needed for it."""
    missing = [want - has for want, has in zip(need, free, strict=True)]
    taken: list[Running] = []
    able = [(each.again_s(each.has[_CORES]) - each.left_s, each) for each in running if each.again_s is not None]
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
    """By how much those that are stopped end later, all together."""
    left = [has - want for has, want in zip(free, need, strict=True)]
    for each in taken:
        left = [amount + has for amount, has in zip(left, each.has, strict=True)]
    later_s = 0.0
    for each in taken:
        assert each.again_s is not None
        fits = all(has >= want for has, want in zip(left, each.least, strict=True))
        cores = min(each.has[_CORES], left[_CORES]) if fits else each.has[_CORES]
        if fits:
            left = [has - want for has, want in zip(left, each.least, strict=True)]
            left[_CORES] -= cores - each.least[_CORES]
        later_s += OVERHEAD_S + (0.0 if fits else seconds) + each.again_s(cores) - each.left_s
    return later_s
