"""Lengths of the trajectories of one group (or family), finished and running ones together.

A finished member counts fully. A running one is right-censored: only a lower bound of its length is known. It counts with its
expected total, with a weight that grows with the share of all trajectories that it has outlasted; so a group whose members
keep running is predicted to be long, while the finished ones alone would make it look short. Knowledge of its prompt from
earlier iterations (`libra.policy.posterior.prompt_history`) counts as additional members.

Differs from Seer (one member runs ahead, and its length predicts the group's): see `Cohorts.is_probe`; every member counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libra.policy import snapshots

KEPT = 1_024
"""Groups without a running member that are kept in case a member returns; the least recently used are dropped first."""
_COLUMNS = ("weight", "total", "running", "running_total", "finished", "live", "probe", "prompt", "past", "past_shift")


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
        self.probe = ""  # key of the member that should run ahead; empty: none
        self.prompt = ""  # of its members, if its prompt may return
        self.past = 0.0  # weight, in members, of the prompt's history
        self.past_shift = 0.0  # log tokens by which the history exceeds other prompts
        self.version = version


class Cohorts:
    """All groups by name.

    Parameters
    ----------
    prior : float
        Weight, in members, of the prior that a group is like all others.
    forget : float
        Factor on a group's weights at a new version, 0..1.
    """

    def __init__(self, prior: float, forget: float) -> None:
        self.prior = prior
        self.forget = forget
        self.version = 0
        self.groups: dict[str, Cohort] = {}
        self._idle: dict[str, None] = {}

    def join(self, name: str, key: str) -> str:
        """A member joins; the first one of a new group becomes its probe. Returns the name in one shared copy."""
        cohort = self.groups.get(name)
        if cohort is None:
            cohort = self.groups[name] = Cohort(self.version, name)
            cohort.probe = key
        self._idle.pop(name, None)
        cohort.live += 1
        return cohort.name

    def recall(self, name: str, prompt: str, past: float, past_shift: float) -> None:
        """A new group has this ``prompt``, with this history; with a history it needs no probe."""
        cohort = self.groups[name]
        cohort.prompt, cohort.past, cohort.past_shift = prompt, past, past_shift
        if past:
            cohort.probe = ""

    def leave(self, name: str, key: str, weight: float, value: float, total: float | None) -> None:
        """A member ends: its weight as a running member is removed, and its true log ``total`` is added if known."""
        cohort = self._fresh(name)
        cohort.live -= 1
        cohort.running = cohort.running - weight if cohort.live else 0.0  # sums drift; an empty one is exact
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
        """Change the weight and value of a running member."""
        cohort = self.groups[name]
        cohort.running += new_weight - weight
        cohort.running_total += new_weight * new_value - weight * value

    def shift(self, name: str, centre: float, weight: float, value: float) -> tuple[float, float]:
        """By how much a member is expected to be longer than ``centre`` (log tokens), and with what certainty (0..1).

        ``weight`` and ``value`` are those of the member itself, which is left out.
        """
        cohort = self._fresh(name)
        others = cohort.weight + cohort.running - weight
        known = others + cohort.past
        if known < 1e-6:
            return 0.0, 0.0
        sure = known + self.prior
        total = cohort.total + cohort.running_total - weight * value
        return (total - centre * others + cohort.past * cohort.past_shift) / sure, known / sure

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values; the groups as columns."""
        groups = self.groups.values()
        return {
            **snapshots.save(self, ("version", "prior")),
            **{part: [getattr(group, part) for group in groups] for part in _COLUMNS},
            "names": list(self.groups),
            "versions": [group.version for group in groups],
            "idle": list(self._idle),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        snapshots.load(self, ("version", "prior"), snapshot)
        self.groups = {}
        columns = (snapshot[part] for part in _COLUMNS)
        for name, version, *values in zip(snapshot["names"], snapshot["versions"], *columns, strict=True):
            cohort = self.groups[name] = Cohort(version, name)
            snapshots.load(cohort, _COLUMNS, dict(zip(_COLUMNS, values, strict=True)))
        self._idle = dict.fromkeys(snapshot["idle"])

    def _fresh(self, name: str) -> Cohort:
        cohort = self.groups[name]
        if cohort.version != self.version:
            keep = self.forget ** (self.version - cohort.version)
            cohort.weight *= keep
            cohort.total *= keep
            cohort.version = self.version
        return cohort


def lognormal_remaining(centre: float, spread: float, log_done: float) -> float:
    """Logarithm of the expected remainder of a lognormal total (log mean ``centre``, log deviation ``spread``) beyond
    ``log_done``."""
    upper = (log_done - centre) / (spread * 1.4142135623730951)
    survival = math.erfc(upper)
    if survival < 1e-6:  # far in the tail: the inverse of the hazard rate
        return log_done + math.log(spread * spread / (log_done - centre))
    half = 0.5 * spread * spread
    total = math.exp(centre + half) * math.erfc(upper - spread * 0.7071067811865476) / survival
    rest = total - math.exp(log_done)
    return math.log(rest) if rest > 1.0 else 0.0
