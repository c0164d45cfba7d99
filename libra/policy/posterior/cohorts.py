"""Lengths of the trajectories of one group or family, running and earlier ones included.

An ended member counts fully. A running member is right-censored: its expected total counts, with a
weight that grows with the share of trajectories that it has outlasted. `History` adds further
members: a prompt that was long is long again (RhymeRL, arXiv:2508.18588), and a measured
`persistence` accounts for drift. Differs from Seer, where one member's length predicts its group's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

KEPT_GROUPS = 1_024  # groups kept without a running member, by last use


class Cohort(msgspec.Struct, array_like=True, gc=False):
    """Sums over the members of one group; totals are logarithms of tokens."""

    weight: float = 0.0  # decaying number of ended members
    total: float = 0.0  # their totals
    running: float = 0.0  # weights of running members
    running_total: float = 0.0  # weight times expected total
    finished: int = 0
    live: int = 0
    probe: str = ""  # member that should run ahead, since the group is unknown
    prompt: str = ""  # if it may return
    past: float = 0.0  # weight of its history, in members
    past_shift: float = 0.0  # log tokens by which that exceeds other prompts

    def scale(self, factor: float) -> None:
        self.weight *= factor
        self.total *= factor

    def leave(self, weight: float, value: float, total: float | None) -> None:
        """A member ends: remove its running weight, and add its true ``total`` if known."""
        self.live -= 1
        self.running = self.running - weight if self.live else 0.0  # exact if empty
        self.running_total = self.running_total - weight * value if self.live else 0.0
        if total is not None:
            self.weight += 1.0
            self.total += total
            self.finished += 1


class Cohorts(msgspec.Struct, array_like=True):
    """All groups by name; ``idle`` groups are ordered by last use."""

    prior: float  # weight of the prior that a group is like all others, in members
    by_name: dict[str, Cohort] = {}
    idle: dict[str, None] = {}

    def join(self, name: str, key: str) -> Cohort:
        cohort = self.by_name.setdefault(name, Cohort(probe=key))
        self.idle.pop(name, None)
        cohort.live += 1
        return cohort

    def leave(self, name: str, key: str, weight: float, value: float, total: float | None) -> Cohort:
        cohort = self.by_name[name]
        cohort.leave(weight, value, total)
        if cohort.probe == key or total is not None:
            cohort.probe = ""
        if not cohort.live and not cohort.finished:
            del self.by_name[name]
        elif not cohort.live:
            self.idle[name] = None
            if len(self.idle) > KEPT_GROUPS:
                oldest = next(iter(self.idle))
                del self.idle[oldest], self.by_name[oldest]
        return cohort

    def shift(self, name: str, centre: float, weight: float, value: float) -> tuple[float, float]:
        """Log tokens by which a member should exceed ``centre``, and the certainty (0 to 1)."""
        cohort = self.by_name[name]
        others = cohort.weight + cohort.running - weight
        known = others + cohort.past
        if known < 1e-6:
            return 0.0, 0.0
        sure = known + self.prior
        total = cohort.total + cohort.running_total - weight * value
        return (total - centre * others + cohort.past * cohort.past_shift) / sure, known / sure

    def scale(self, factor: float) -> None:
        for cohort in self.by_name.values():
            cohort.scale(factor)


def lognormal_remaining(centre: float, spread: float, log_done: float) -> float:
    """Log of the expected remainder of a lognormal total beyond ``log_done``."""
    upper = (log_done - centre) / (spread * 1.4142135623730951)
    survival = math.erfc(upper)
    if survival < 1e-6:  # far in the tail: the inverse of the hazard rate
        return log_done + math.log(spread * spread / (log_done - centre))
    half = 0.5 * spread * spread
    total = math.exp(centre + half) * math.erfc(upper - spread * 0.7071067811865476) / survival
    rest = total - math.exp(log_done)
    return math.log(rest) if rest > 1.0 else 0.0


KEPT_PROMPTS = 16_384  # maximum number of prompts kept; the least recently seen are dropped first
FIRST_PERSISTENCE = 0.8  # before any prompt has returned; its weight in groups follows
FIRST_GROUPS = 4.0
FORGET_RETURNED = 0.998  # weight of a comparison after each later one
LARGEST_PERSISTENCE = 0.95
CENTRE_GROUPS = 8.0  # weight, in groups, of the previous version's centre in the next one


class Past(NamedTuple):
    """Log tokens by which a prompt's trajectories differed from others, and their number."""

    departure: float
    members: float


class History(msgspec.Struct):
    """History of all prompts; ended groups are compared with others of the same version."""

    past: dict[str, Past] = {}
    pending: dict[str, tuple[float, float, float]] = {}  # mean log total, members, recalled
    centre: float | None = None  # log total of an average group
    squares: float = 0.0  # of recalled departures
    products: float = 0.0  # with the observed ones

    @property
    def persistence(self) -> float:
        """Measured share of a prompt's difference that lasts until it returns, 0 to 0.95."""
        first = FIRST_GROUPS * 0.5
        share = (self.products + first * FIRST_PERSISTENCE) / (self.squares + first)
        return min(max(share, 0.0), LARGEST_PERSISTENCE)

    @property
    def measured(self) -> float:
        return self.persistence if self.squares else 0.0

    def recall(self, prompt: str, prior: float) -> float | None:
        """Log tokens by which members of ``prompt`` should differ; None for a new prompt."""
        past = self.past.get(prompt)
        return None if past is None else past.departure * past.members / (past.members + prior)

    def ended(self, prompt: str, mean_log: float, members: float, recalled: float | None) -> None:
        """A group of ``prompt`` has ended; ``recalled`` was its forecast. The last call counts."""
        self.pending[prompt] = (mean_log, members, 0.0 if recalled is None else recalled)

    def published(self) -> None:
        """A new version: compare and keep the groups that ended since the last version."""
        ended, self.pending = self.pending, {}
        if not ended:
            return
        mean = sum(mean_log for mean_log, _, _ in ended.values()) / len(ended)
        before = mean if self.centre is None else self.centre
        self.centre = centre = (len(ended) * mean + CENTRE_GROUPS * before) / (len(ended) + CENTRE_GROUPS)
        for prompt, (mean_log, members, recalled) in ended.items():
            departure = mean_log - centre
            if recalled:
                self.squares = FORGET_RETURNED * self.squares + recalled * recalled
                self.products = FORGET_RETURNED * self.products + recalled * departure
            self._keep(prompt, departure, members)

    def _keep(self, prompt: str, departure: float, members: float) -> None:
        before = self.past.pop(prompt, None)
        if before is not None:
            worth = self.persistence * min(before.members, members)
            departure = (departure * members + before.departure * worth) / (members + worth)
            members += worth
        self.past[prompt] = Past(departure, members)
        if len(self.past) > KEPT_PROMPTS:
            del self.past[next(iter(self.past))]
