"""Lengths of the trajectories of one group (or family), ended and running ones together.

An ended member counts fully. A running one is right-censored: only a lower bound of its length is
known. It counts with its expected total, with a weight that grows with the share of all
trajectories that it has outlasted; so a group whose members keep running is predicted to be long,
while the ended ones alone would make it look short. Knowledge of its prompt from earlier iterations
(`libra.policy.posterior.cohorts`) counts as additional members.

Differs from Seer (one member runs ahead, and its length predicts the group's): see `Cohort.probe`;
every member counts.

Lengths of a prompt's earlier trajectories: a prior for a group before any member runs.

Prompts of a data set return with every pass over it, and one that was long is long again far more
often than by chance (RhymeRL, arXiv:2508.18588, reports it of consecutive epochs). Lengths drift
while a policy learns, so the history keeps by how much a prompt's trajectories were longer than
those of the other prompts of their time.

How much of that persists is measured: every prompt that returns is compared with its history
(`persistence`).

"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

KEPT_GROUPS = 1_024
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
                if len(self.idle) > KEPT_GROUPS:
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


KEPT_PROMPTS = 16_384
"""Maximum number of prompts kept; the least recently seen are dropped first."""
FIRST_PERSISTENCE = 0.8
"""Assumed share of a prompt's departure that persists, before any prompt has returned."""
FIRST_GROUPS = 4.0
"""Weight of that assumption, in groups."""
FORGET_RETURNED = 0.998
"""Weight of a comparison after each later one."""
LARGEST_PERSISTENCE = 0.95
CENTRE_GROUPS = 8.0
"""Weight, in groups, of the previous version's centre in that of the next."""


class Past(NamedTuple):
    """Of one prompt: log tokens by which its trajectories departed from the others', and how many
    those were."""

    departure: float
    members: float


class History(msgspec.Struct):
    """The history of all prompts.

    A group that has ended waits for the next version; then it is compared with those that ended in
    the same version.

    Attributes
    ----------
    past : dict
        By prompt.
    pending : dict
        By prompt, of groups ended since the last version: mean log total, members, the departure
        recalled when it began.
    centre : float or None
        Log total of an average group.
    squares, products : float
        Of what was recalled of prompts that returned, and with what was observed.
    """

    past: dict[str, Past] = {}
    pending: dict[str, tuple[float, float, float]] = {}
    centre: float | None = None
    squares: float = 0.0
    products: float = 0.0

    @property
    def persistence(self) -> float:
        """Measured share of a departure that persists until the prompt returns, 0 to 0.95."""
        first = FIRST_GROUPS * 0.5
        share = (self.products + first * FIRST_PERSISTENCE) / (self.squares + first)
        return min(max(share, 0.0), LARGEST_PERSISTENCE)

    @property
    def measured(self) -> float:
        """`persistence`, or 0 before any prompt has returned."""
        return self.persistence if self.squares else 0.0

    def recall(self, prompt: str, prior: float) -> float | None:
        """Log tokens by which members of ``prompt`` are expected to depart, if all of it persisted;
        None: it is new.

        ``prior`` is the weight, in members, of the prior that a prompt is like all others.
        """
        past = self.past.get(prompt)
        return None if past is None else past.departure * past.members / (past.members + prior)

    def ended(self, prompt: str, mean_log: float, members: float, recalled: float | None) -> None:
        """A group of ``prompt`` has ended; ``recalled`` was its history before. The last call
        counts."""
        self.pending[prompt] = (mean_log, members, 0.0 if recalled is None else recalled)

    def published(self) -> None:
        """A new version: compare and keep what has ended since the last one."""
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
