"""Which of the actions that begin now get more cores than their least.

Spare cores are given one size at a time, each time to the action that gains most seconds per core. A size must pay off: an action
on more cores ends sooner by ``T (1/v - 1/v')``, but holds ``T (c'/v' - c/v)`` core-seconds more, because speeds ``v`` rise slower
than cores ``c``. Each of these core-seconds delays every action that waits by ``1 / C`` seconds, with ``C`` cores in all. So

    T (1/v - 1/v')  >  W / C  x  T (c'/v' - c/v)

with ``W`` the larger of the actions that wait now and the mean number that waited when one came (`Pressure`): where none waits,
all cores are given; the longer the line, the less is; and where enlargement itself made a line, it is given up. ARL-Tangram
(3.2) also evicts the last action that was admitted if the others then gain more; here an action that fits is never held back, so
admission is in arrival order with enlargement and without.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from libra.policy.leases.speed_up import SpeedUp

FORGETTING = 0.02
"""Weight of the newest arrival in the mean number of actions that wait."""


class Pressure:
    """The mean number of actions that wait for cores, as each one that came saw it."""

    def __init__(self) -> None:
        self.mean = 0.0

    def came(self, waiting: int) -> None:
        """An action came while ``waiting`` others waited."""
        self.mean = round(self.mean + FORGETTING * (waiting - self.mean), 9)


class Candidate(NamedTuple):
    """An action that begins now.

    ``seconds``: expected with its least cores.
    """

    holder: str
    worker: str
    cores: int
    curve: SpeedUp
    seconds: float


def enlarged(
    candidates: list[Candidate], free_cores: dict[str, int], num_waiting: float, total_cores: int
) -> list[tuple[str, int, str]]:
    """(holder, cores, reason) of every candidate that gets more; ``free_cores`` of its worker fall accordingly."""
    price = num_waiting / max(1, total_cores)
    given: dict[str, tuple[int, str]] = {}
    steps: list[tuple[float, int, int, float]] = []  # a heap of (-gain per core, candidate, size, seconds saved)
    for index, each in enumerate(candidates):
        free = free_cores[each.worker]
        size = each.curve.unmeasured(each.cores + free) if num_waiting < 1 else None
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
            given[each.holder] = size, f"{size} cores save {saved_s:.3g} s more, {num_waiting:.3g} wait"
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
        if not cores < size <= cores + free:
            continue
        then_s = each.seconds / each.curve.speed(size)
        gain = (now_s - then_s) - price * (size * then_s - cores * now_s)
        if gain > 0 and (best is None or -gain / (size - cores) < best[0]):
            best = (-gain / (size - cores), index, size, now_s - then_s)
    return best
