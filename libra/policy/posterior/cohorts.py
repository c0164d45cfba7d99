"""Lengths of the trajectories of one group (or family), ended and running ones together.

An ended member counts fully. A running one is right-censored: only a lower bound of its length is
known. It counts with its expected total, with a weight that grows with the share of all
trajectories that it has outlasted; so a group whose members keep running is predicted to be long,
while the ended ones alone would make it look short. Knowledge of its prompt from earlier iterations
(`libra.policy.posterior.prompt_history`) counts as additional members.

Differs from Seer (one member runs ahead, and its length predicts the group's): see `Cohort.probe`;
every member counts.
"""

from __future__ import annotations

import math

import msgspec

KEPT = 1_024
"""Groups kept without a running member; the least recently used are dropped first."""


class Cohort(msgspec.Struct, array_like=True, gc=False):
    """Sums over the members of one group; totals are logarithms of tokens.

    Attributes
    ----------
    weight, total : float
        Of ended members: their number, and the sum of their totals; both decay.
    running, running_total : float
        Of running members: sum of their weights, and of weight times expected total.
    probe : str
        Key of the member that should run ahead because nothing is known of the group; empty: none.
    prompt : str
        Of its members, if its prompt may return.
    past, past_shift : float
        Weight, in members, of the prompt's history, and log tokens by which that exceeds other
        prompts.
    """

    weight: float = 0.0
    total: float = 0.0
    running: float = 0.0
    running_total: float = 0.0
    finished: int = 0
    live: int = 0
    probe: str = ""
    prompt: str = ""
    past: float = 0.0
    past_shift: float = 0.0

    def scale(self, factor: float) -> None:
        """Multiply the weight of ended members by ``factor``."""
        self.weight *= factor
        self.total *= factor

    def leave(self, weight: float, value: float, total: float | None) -> None:
        """A member ends: remove its running weight, and add its true ``total`` if known."""
        self.live -= 1
        self.running = self.running - weight if self.live else 0.0  # sums drift; an empty one is exact
        self.running_total = self.running_total - weight * value if self.live else 0.0
        if total is not None:
            self.weight += 1.0
            self.total += total
            self.finished += 1


class Cohorts(msgspec.Struct, array_like=True):
    """All groups by name.

    Attributes
    ----------
    prior : float
        Weight, in members, of the prior that a group is like all others.
    by_name : dict
    idle : dict
        Names of groups without a running member, the least recently used first.
    """

    prior: float
    by_name: dict[str, Cohort] = {}
    idle: dict[str, None] = {}

    def join(self, name: str, key: str) -> Cohort:
        """A member joins; the first one of a new group becomes its probe."""
        cohort = self.by_name.get(name)
        if cohort is None:
            cohort = self.by_name[name] = Cohort(probe=key)
        self.idle.pop(name, None)
        cohort.live += 1
        return cohort

    def leave(self, name: str, key: str, weight: float, value: float, total: float | None) -> Cohort:
        """A member ends; see `Cohort.leave`."""
        cohort = self.by_name[name]
        cohort.leave(weight, value, total)
        if cohort.probe == key or total is not None:
            cohort.probe = ""
        if not cohort.live:
            if cohort.finished:
                self.idle[name] = None
                if len(self.idle) > KEPT:
                    oldest = next(iter(self.idle))
                    del self.idle[oldest], self.by_name[oldest]
            else:
                del self.by_name[name]
        return cohort

    def shift(self, name: str, centre: float, weight: float, value: float) -> tuple[float, float]:
        """Log tokens by which a member should exceed ``centre``, and the certainty of that (0..1).

        ``weight`` and ``value`` are those of the member itself, which is left out.
        """
        cohort = self.by_name[name]
        others = cohort.weight + cohort.running - weight
        known = others + cohort.past
        if known < 1e-6:
            return 0.0, 0.0
        sure = known + self.prior
        total = cohort.total + cohort.running_total - weight * value
        return (total - centre * others + cohort.past * cohort.past_shift) / sure, known / sure

    def scale(self, factor: float) -> None:
        """Multiply the weight of all ended members by ``factor``."""
        for cohort in self.by_name.values():
            cohort.scale(factor)


def lognormal_remaining(centre: float, spread: float, log_done: float) -> float:
    """Log of the expected rest of a lognormal total (``centre``, ``spread``) beyond ``log_done``."""
    upper = (log_done - centre) / (spread * 1.4142135623730951)
    survival = math.erfc(upper)
    if survival < 1e-6:  # far in the tail: the inverse of the hazard rate
        return log_done + math.log(spread * spread / (log_done - centre))
    half = 0.5 * spread * spread
    total = math.exp(centre + half) * math.erfc(upper - spread * 0.7071067811865476) / survival
    rest = total - math.exp(log_done)
    return math.log(rest) if rest > 1.0 else 0.0
