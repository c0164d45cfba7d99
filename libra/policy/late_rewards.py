"""Rewards that arrive after their trajectory was trained: which batch takes each, at which weight.

Source: Retroactive Advantage Correction, arXiv:2606.27580. A late reward adds a gradient with the
advantage ``exp(-delay / tau) x clipped ratio x (true - provisional)``. Differs from the paper: the
difference is between two *advantages* of the group, because its baseline changes too; the ratio is
per token, as in the run's loss; a correction is a row of its own; a provisional advantage is scaled
by `GuessWorth`, the slope of final on provisional advantages in this run.

Invariants
----------
1. A delivered reward counts once: in its trajectory's batch if in time, else in the next batch.
2. No group waits for more than ``versions`` batches; then missing rewards are dropped and named.
3. At weight 1, a group's corrections add up to the advantages of its final rewards minus the
   advantages that it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int, int]


def age_weight(delay: int, tau: float) -> float:
    return math.exp(-delay / tau)


def correction(
    before: NDArray[np.float64], after: NDArray[np.float64], *, delay: int, tau: float
) -> NDArray[np.float64]:
    """Advantages still to train on: ``after`` minus ``before``, weighted by age."""
    corrected: NDArray[np.float64] = age_weight(delay, tau) * (after - before)
    return corrected


KEPT = 0.8  # evidence on guesses that a batch with more of it keeps of earlier batches


@dataclass(frozen=True, slots=True)
class GuessWorth:
    """Worth of provisional rewards, from groups all of whose rewards came.

    ``product`` sums (guessed x final advantage), ``square`` sums (guessed advantage)^2. Both decay
    by `KEPT` and include one trajectory of mean size that was guessed right. Without evidence a
    provisional reward counts in full.
    """

    product: float = 0.0
    square: float = 0.0

    @property
    def slope(self) -> float:
        return min(1.0, max(0.0, self.product / self.square)) if self.square > 0 else 1.0

    def after(self, pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> GuessWorth:
        """The worth after a batch with these (guessed, final) advantages of each group."""
        if not any(guessed_G.any() for guessed_G, _ in pairs):
            return self
        product = sum(float(guessed_G @ final_G) for guessed_G, final_G in pairs)
        square = sum(float(guessed_G @ guessed_G) for guessed_G, _ in pairs)
        right = 0.0 if self.square else square / sum(np.count_nonzero(guessed_G) for guessed_G, _ in pairs)
        return GuessWorth(KEPT * self.product + product + right, KEPT * self.square + square + right)


def guessed_share(trains: NDArray[np.bool_], missing: Iterable[int]) -> float:
    return float(trains[list(missing)].sum() / max(1, trains.sum()))


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    iteration: int
    group: int
    batch: int  # that trained it first
    missing: tuple[int, ...]  # samples whose reward has not come
    given: Mapping[int, float] = field(default_factory=dict)  # late rewards that count already
    guess_weight: float = 1.0  # `GuessWorth.slope` in its batch

    def places(self) -> list[Place]:
        return [(self.iteration, self.group, sample) for sample in self.missing]


class Arrival(NamedTuple):
    """Rewards of a trained group that count now, with their age in versions."""

    group: WaitingGroup
    rewards: Mapping[int, float]
    delay: int


class Settled(NamedTuple):
    """Late rewards that count in a batch, groups that stay waiting, and dropped trajectories."""

    arrivals: tuple[Arrival, ...]
    waiting: tuple[WaitingGroup, ...]
    dropped: tuple[Place, ...]


def settle(waiting: Iterable[WaitingGroup], batch: int, came: Mapping[Place, float], *, versions: int) -> Settled:
    """Assign the rewards that ``came`` to waiting groups, for the step of ``batch``.

    Rewards of samples that are not missing are ignored.
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
