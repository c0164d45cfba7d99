"""What siblings tell of those of their group that have not begun, from the first tokens on and without training.

Totals are taken for lognormal, with a mean of each group's own: log total = m + g + e, where g differs between groups and e
within them. A finished member says its total; one that runs says only that its total is above what it has generated (right
censoring), so it counts with the total that is then expected, which comes to the estimate that is most likely by repetition
(expectation maximisation; one round whenever it is asked). Groups are drawn to the mean of all by as much as they have in common
with themselves: where finished siblings turn out as different as strangers, all groups are alike.

Promises
--------
1. Deterministic in the sequence of calls.
2. ``restore(snapshot())`` changes no later answer.
3. What is kept is bounded by what is live: a group goes with its last member.

Differs from Seer (arXiv:2511.14617), where one member runs ahead and its length stands for the group: every member counts, also
one that still runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SAMPLE = 256
"""Most members of each kind, finished and running, that `refresh` looks at."""
ROUNDS = 8
"""Rounds of `refresh`."""
PRIOR_PAIRS = 5.0
"""Comparisons of siblings' worth of belief that half of the variance lies within groups."""
_ROOT_2, _ROOT_2_PI = math.sqrt(2.0), math.sqrt(2.0 * math.pi)


def beyond(mean: float, deviation: float, bound: float) -> float:
    """Mean of a normal variable that is known to be above ``bound``."""
    z = (bound - mean) / deviation
    if z < -4.0:
        return mean
    if z > 5.0:
        return bound + deviation / z
    tail = 0.5 * math.erfc(z / _ROOT_2)
    return mean + deviation * math.exp(-0.5 * z * z) / (_ROOT_2_PI * tail)


class _Group:
    """Members of one group that have begun."""

    __slots__ = ("finished", "members", "running", "shift")

    def __init__(self) -> None:
        self.members = 0  # that live, begun or not
        self.running: dict[str, int] = {}  # tokens generated
        self.finished: list[float] = []  # logarithms of totals
        self.shift = 0.0  # believed difference from the mean of all, of logarithms


class Kinship:
    """Groups by name, and what all have in common."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._recent: list[float] = []  # logarithms of the latest totals
        self._mean, self._variance = math.log(1000.0), 1.0
        self._pairs, self._within = 0.0, 0.0

    def join(self, name: str) -> None:
        """One more member lives."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group()
        group.members += 1

    def generated(self, name: str, key: str, tokens: int) -> None:
        """A member has come to so many tokens in all."""
        self._groups[name].running[key] = tokens

    def end(self, name: str, key: str, *, completed: bool) -> None:
        """A member is over; where it failed, its length says nothing."""
        group = self._groups[name]
        tokens = group.running.pop(key, 0)
        if completed and tokens:
            total = math.log(tokens)
            if group.finished:
                count = len(group.finished)
                gap = total - sum(group.finished) / count
                self._pairs += 1.0
                self._within += gap * gap * count / (count + 1.0)
            group.finished.append(total)
            self._recent.append(total)
            del self._recent[:-SAMPLE]
        group.members -= 1
        if not group.members:
            del self._groups[name]

    def longer(self, name: str) -> float:
        """How much longer than all others the members of a group are believed to be, as a logarithm; 0 where nothing is known."""
        group = self._groups.get(name)
        if group is None or not (group.finished or group.running):
            return 0.0
        within, between = self._parts()
        mean, deviation = self._mean + group.shift, math.sqrt(within)
        total = sum(group.finished)
        for tokens in group.running.values():
            total += beyond(mean, deviation, math.log(tokens))
        count = len(group.finished) + len(group.running)
        group.shift = (total - count * self._mean) / (count + within / between)
        return group.shift

    def _parts(self) -> tuple[float, float]:
        """Variance within groups and between them."""
        within = (self._within + PRIOR_PAIRS * 0.5 * self._variance) / (self._pairs + PRIOR_PAIRS)
        within = min(max(within, 0.1 * self._variance), 0.95 * self._variance)
        return within, self._variance - within

    def refresh(self) -> None:
        """Mean and variance of all totals anew, those of running ones above what they have; milliseconds."""
        bounds = [math.log(tokens) for group in self._groups.values() for tokens in group.running.values()]
        step = 1 + len(bounds) // SAMPLE
        weight, bounds = float(step), bounds[::step]
        finished = self._recent
        count = len(finished) + weight * len(bounds)
        if count < 8.0:
            return
        for _ in range(ROUNDS):
            mean, deviation = self._mean, math.sqrt(self._variance)
            total, squares = sum(finished), sum((value - mean) ** 2 for value in finished)
            for bound in bounds:
                expected = beyond(mean, deviation, bound)
                total += weight * expected
                # E[(x - m)^2 | x > b] = s^2 + (b - m) (E[x | x > b] - m)
                squares += weight * (self._variance + (bound - mean) * (expected - mean))
            self._mean = total / count
            self._variance = min(max(squares / count - (self._mean - mean) ** 2, 0.05), 4.0)

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {
            "groups": {
                name: [group.members, dict(sorted(group.running.items())), list(group.finished), group.shift]
                for name, group in sorted(self._groups.items())
            },
            "recent": list(self._recent),
            "all": [self._mean, self._variance, self._pairs, self._within],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._groups = {}
        for name, (members, running, finished, shift) in snapshot["groups"].items():
            group = self._groups[str(name)] = _Group()
            group.members, group.shift = int(members), float(shift)
            group.running = {str(key): int(tokens) for key, tokens in running.items()}
            group.finished = [float(value) for value in finished]
        self._recent = [float(value) for value in snapshot["recent"]]
        self._mean, self._variance, self._pairs, self._within = (float(value) for value in snapshot["all"])
