"""Rewards that arrive after their trajectory was trained: which batch takes them, and how much they count. Pure.

Source: Retroactive Advantage Correction (RAC), arXiv:2606.27580. There a trajectory trains on a provisional reward at once, and
when the true one arrives ``delay`` steps later, its gradient is added with the advantage ``w(delay) x clipped ratio x (true -
provisional)``, ``w(delay) = exp(-delay / tau)``.

Differs from the paper: what is added is the difference of two *advantages* of the group, with the rewards known before and with
those known now, because the baseline of the group changes too; so several arrivals in one group add up to the advantages of the
final rewards. The ratio is that of the run's loss, per token and clipped there, and counts once; in the authors' code a product
over the sequence counts in the advantage and again in the loss. What they add to the advantage of a row of the next batch with the
same name, which no batch has, is here a row of its own.

A provisional reward is a guess, and whatever weight its advantages get, the correction adds the rest. Counted in full, as in the
paper, a poor guess costs noise twice: that of the guess, and that of taking it back. So it counts for what guesses were worth in
this run (`GuessWorth`): the slope of final on provisional advantages, with which the two parts are uncorrelated, and the noise
of both together is that of rewards on time.

With an unbiased ratio the expected gradient lacks ``1 - w(delay)`` of what the late rewards contribute: the bias is linear in it.

Invariants
----------
1. A delivered reward counts once: in the batch of its trajectory if it is there by then, else in the next batch after it arrived.
2. No group waits for more than ``versions`` batches; what has not come by then is dropped, and named.
3. For weight 1 the corrections of a group add up to the advantages of its final rewards minus those it was trained on, whatever
   its guesses counted for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int, int]
"""Iteration, group and sample of a trajectory."""


def age_weight(delay: int, tau: float) -> float:
    """Weight in (0, 1] of a reward that arrives ``delay`` versions after its trajectory was trained."""
    return math.exp(-delay / tau)


def correction(
    before: NDArray[np.float64], after: NDArray[np.float64], *, delay: int, tau: float
) -> NDArray[np.float64]:
    """Advantages still to train on: ``after``, with the rewards known now, less ``before``, weighed by age; arrays of one shape."""
    corrected: NDArray[np.float64] = age_weight(delay, tau) * (after - before)
    return corrected


KEPT = 0.8
"""Of the evidence on guesses, what a batch with more of it keeps of what was there before."""


@dataclass(frozen=True, slots=True)
class GuessWorth:
    """What provisional rewards were worth, from groups all of whose rewards came.

    Attributes
    ----------
    product, square : float
        Sums over trajectories of (advantage of the guess x final advantage) and of (advantage of the guess)^2, those of earlier
        batches weighed by `KEPT`; with the first evidence, those of one more trajectory of its mean size that was guessed right.
        Without evidence both are 0, and a guess counts in full.
    """

    product: float = 0.0
    square: float = 0.0

    @property
    def slope(self) -> float:
        """Weight of a guess in [0, 1]."""
        return min(1.0, max(0.0, self.product / self.square)) if self.square > 0 else 1.0

    def after(self, pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> GuessWorth:
        """With what a batch learned: for each group the part of its advantages that was guessed, and what that part became."""
        if not any(guessed_G.any() for guessed_G, _ in pairs):
            return self
        product = sum(float(guessed_G @ final_G) for guessed_G, final_G in pairs)
        square = sum(float(guessed_G @ guessed_G) for guessed_G, _ in pairs)
        right = 0.0 if self.square else square / sum(np.count_nonzero(guessed_G) for guessed_G, _ in pairs)
        return GuessWorth(KEPT * self.product + product + right, KEPT * self.square + square + right)


def guessed_share(trains: NDArray[np.bool_], missing: Iterable[int]) -> float:
    """Of the trajectories of a group that train, the share whose reward is a guess."""
    return float(trains[list(missing)].sum() / max(1, trains.sum()))


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A trained group with rewards to come.

    Attributes
    ----------
    batch : int
        The batch that trained it first.
    missing : tuple of int
        Samples whose reward has not come.
    given : mapping of int to float
        Rewards of samples that came late, and count already.
    guess_weight : float
        What its guesses count for, 0 to 1: `GuessWorth.slope` in its batch, or 1 where guesses count in full.
    """

    iteration: int
    group: int
    batch: int
    missing: tuple[int, ...]
    given: Mapping[int, float] = field(default_factory=dict)
    guess_weight: float = 1.0

    def places(self) -> list[Place]:
        """The trajectories whose reward has not come."""
        return [(self.iteration, self.group, sample) for sample in self.missing]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rewards of a trained group that count now: ``group`` as it waited, the rewards, and the age in versions."""

    group: WaitingGroup
    rewards: Mapping[int, float]
    delay: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What a batch does about late rewards: ``waiting`` are the groups it leaves for the next one, ``dropped`` the trajectories
    whose reward no batch will take."""

    arrivals: tuple[Arrival, ...]
    waiting: tuple[WaitingGroup, ...]
    dropped: tuple[Place, ...]


def settle(waiting: Iterable[WaitingGroup], batch: int, came: Mapping[Place, float], *, versions: int) -> Settled:
    """Take what ``came`` for the groups that wait, for the step of ``batch``.

    Parameters
    ----------
    waiting : iterable of WaitingGroup
        Those that the batch before left.
    came : mapping
        Rewards that were delivered, by trajectory; others than of missing samples are ignored.
    versions : int
        Batches after its own for which a group waits.
    """
    arrivals, left, dropped = [], [], []
    for group in waiting:
        delay = batch - group.batch
        rewards = {place[2]: came[place] for place in group.places() if place in came}
        if rewards and delay <= versions:
            arrivals.append(Arrival(group, rewards, delay))
        missing = tuple(s for s in group.missing if s not in rewards or delay > versions)
        if missing and delay < versions:
            given = {**group.given, **rewards}
            left.append(replace(group, missing=missing, given=given))
        elif missing:
            dropped += [(group.iteration, group.group, sample) for sample in missing]
    return Settled(tuple(arrivals), tuple(left), tuple(dropped))
