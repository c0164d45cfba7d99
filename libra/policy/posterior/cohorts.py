"""How long the trajectories of one group (or family) turn out, finished and running ones together.

A finished member counts fully. A running one is right-censored: all that is known is that it lasts longer than it has. It
counts with the total that its progress lets expect, the more the larger the share of all trajectories that it has outlasted;
so a group whose members run on is known to be a long one, where the finished ones alone would say it is short. What is known of
its prompt from earlier (`libra.policy.posterior.history`) counts as so many members more.

Differs from Seer (one member runs ahead and its length stands for the group): see `Cohorts.is_probe`; every member counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KEPT = 1_024
"""Groups without a live member that are remembered, in case a member is made anew; the longest untouched goes first."""


class Cohort:
    """Sums over the members of one group."""

    __slots__ = (
        "finished", "live", "name", "past", "past_shift", "probe", "prompt", "running", "running_total", "total", "version",
        "weight",
    )  # fmt: skip

    def __init__(self, version: int, name: str) -> None:
        self.name = name
        self.weight = 0.0  # of finished members
        self.total = 0.0  # weighted sum of logarithms of their totals
        self.running = 0.0  # the same of running ones
        self.running_total = 0.0
        self.finished = 0
        self.live = 0
        self.probe = ""  # key of the member that should run ahead; empty: none needed any more
        self.prompt = ""  # of its members, where it may come again
        self.past = 0.0  # members' worth of what is known from earlier
        self.past_shift = 0.0  # log tokens by which they are said to be longer than others
        self.version = version


class Cohorts:
    """All groups by name.

    Parameters
    ----------
    prior : float
        Members' worth of belief that the group is like all others.
    forget : float
        What a group's knowledge is worth after a new version, 0..1.
    """

    def __init__(self, prior: float, forget: float) -> None:
        self.prior = prior
        self.forget = forget
        self.version = 0
        self.groups: dict[str, Cohort] = {}
        self._idle: dict[str, None] = {}

    def join(self, name: str, key: str) -> str:
        """A member has come; the first one of a group that knows nothing becomes its probe.

        Answers the name in the one copy that all members may hold.
        """
        cohort = self.groups.get(name)
        if cohort is None:
            cohort = self.groups[name] = Cohort(self.version, name)
            cohort.probe = key
        self._idle.pop(name, None)
        cohort.live += 1
        return cohort.name

    def recall(self, name: str, prompt: str, past: float, past_shift: float) -> None:
        """A group that has just come is of ``prompt``, of which this much is known; then it needs no probe."""
        cohort = self.groups[name]
        cohort.prompt, cohort.past, cohort.past_shift = prompt, past, past_shift
        if past:
            cohort.probe = ""

    def leave(self, name: str, key: str, weight: float, value: float, total: float | None) -> None:
        """A member is over: what it counted for as running goes, its true log ``total`` comes, if it is known."""
        cohort = self._fresh(name)
        cohort.live -= 1
        cohort.running = cohort.running - weight if cohort.live else 0.0  # sums drift, an empty one is exact
        cohort.running_total = cohort.running_total - weight * value if cohort.live else 0.0
        if cohort.probe == key:
            cohort.probe = ""
        if total is not None:
            cohort.weight += 1.0
            cohort.total += total
            cohort.finished += 1
            cohort.probe = ""
        if not cohort.live:
            if cohort.finished:
                self._idle[name] = None
                if len(self._idle) > KEPT:
                    oldest = next(iter(self._idle))
                    del self._idle[oldest], self.groups[oldest]
            else:
                del self.groups[name]

    def change(self, name: str, weight: float, value: float, new_weight: float, new_value: float) -> None:
        """A running member counts differently from now on."""
        cohort = self.groups[name]
        cohort.running += new_weight - weight
        cohort.running_total += new_weight * new_value - weight * value

    def shift(self, name: str, centre: float, weight: float, value: float) -> tuple[float, float]:
        """How much longer than ``centre`` (log tokens) a member is expected to be, and how sure that is (0..1).

        ``weight`` and ``value`` are what the member itself counts for, and are left out.
        """
        cohort = self._fresh(name)
        others = cohort.weight + cohort.running - weight
        known = others + cohort.past
        if known < 1e-6:
            return 0.0, 0.0
        sure = known + self.prior
        total = cohort.total + cohort.running_total - weight * value
        return (total - centre * others + cohort.past * cohort.past_shift) / sure, known / sure

    def _fresh(self, name: str) -> Cohort:
        cohort = self.groups[name]
        if cohort.version != self.version:
            keep = self.forget ** (self.version - cohort.version)
            cohort.weight *= keep
            cohort.total *= keep
            cohort.version = self.version
        return cohort


def lognormal_remaining(centre: float, spread: float, log_done: float) -> float:
    """Logarithm of the expected rest of a lognormal total (log mean ``centre``, log deviation ``spread``) beyond ``log_done``."""
    upper = (log_done - centre) / (spread * 1.4142135623730951)
    survival = math.erfc(upper)
    if survival < 1e-6:  # far in the tail: one over the hazard
        return log_done + math.log(spread * spread / (log_done - centre))
    half = 0.5 * spread * spread
    total = math.exp(centre + half) * math.erfc(upper - spread * 0.7071067811865476) / survival
    rest = total - math.exp(log_done)
    return math.log(rest) if rest > 1.0 else 0.0


def dump(cohorts: Cohorts) -> dict[str, Any]:
    """Everything ``cohorts`` knows, as values that JSON can hold; the groups as columns."""
    groups = cohorts.groups
    return {
        "version": cohorts.version,
        "prior": cohorts.prior,
        "names": list(groups),
        "weight": [group.weight for group in groups.values()],
        "total": [group.total for group in groups.values()],
        "running": [group.running for group in groups.values()],
        "running_total": [group.running_total for group in groups.values()],
        "finished": [group.finished for group in groups.values()],
        "live": [group.live for group in groups.values()],
        "probe": [group.probe for group in groups.values()],
        "prompt": [group.prompt for group in groups.values()],
        "past": [group.past for group in groups.values()],
        "past_shift": [group.past_shift for group in groups.values()],
        "versions": [group.version for group in groups.values()],
        "idle": list(cohorts._idle),
    }


def load(cohorts: Cohorts, dumped: Mapping[str, Any]) -> None:
    """Let ``cohorts`` know what was dumped, and nothing else."""
    cohorts.version = int(dumped["version"])
    cohorts.prior = float(dumped["prior"])
    cohorts.groups = {}
    parts = ("weight", "total", "running", "running_total", "finished", "live", "probe", "prompt", "past", "past_shift")
    for name, version, *values in zip(dumped["names"], dumped["versions"], *(dumped[p] for p in parts), strict=True):
        cohort = cohorts.groups[name] = Cohort(version, name)
        for part, value in zip(parts, values, strict=True):
            setattr(cohort, part, value)
    cohorts._idle = dict.fromkeys(dumped["idle"])
