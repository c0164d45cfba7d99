"""How far each expert is followed away from the progress-only forecast: as far as it has earned.

Two stages, both fitted to trajectories that neither had seen when it forecast them:

1. Weights >= 0, of sum <= 1, that minimise the squared error of ``base + sum(weight * (expert - base))``.
2. A guard in [0, 1] on the mixture *as it was served at the time*: the lower end of what the best factor on it may be, so a
   gain that chance explains counts as none.

Invariants
----------
1. With nothing measured, or nothing gained, the forecast is the progress-only one and skill is 0.
2. ``skill <= 1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import mul
from typing import Any

import numpy as np

from libra.policy.posterior.compact_rows import Floats

GROUPS = 1024
"""Latest groups whose gain is remembered, to see siblings as one observation."""


SETTLED = 1e-12
"""A sweep that moves all weights together by less is the last."""


class Mixture:
    """Weights of the experts for one target.

    Parameters
    ----------
    num_experts : int
    shrink : float
        Trajectories' worth of belief that an expert gains nothing.
    """

    def __init__(self, num_experts: int, shrink: float) -> None:
        self.shrink = shrink
        self.gram = np.zeros((num_experts, num_experts))
        self.cross = np.zeros(num_experts)
        self.trajectories = 0.0
        self.weights = np.zeros(num_experts)

    def add(self, away: Floats, error: Floats, weight: float) -> None:
        """A trajectory: how far each expert went from the base (N, experts), and how far the truth was (N,)."""
        self.gram += weight * (away.T @ away)
        self.cross += weight * (away.T @ error)
        self.trajectories += weight

    def scale(self, factor: float) -> None:
        """Let everything so far weigh ``factor`` times as much."""
        self.gram *= factor
        self.cross *= factor
        self.trajectories *= factor

    def solve(self, sweeps: int = 60) -> None:
        """Fit the weights, by coordinate descent from where they are; the sum is brought to at most one by a price."""
        gram = self.gram + np.diag(np.diagonal(self.gram) * (self.shrink / max(self.trajectories, 1.0)))
        weights = _descend(gram, self.cross, self.weights, sweeps)
        total = weights.sum()
        if total > 1.0:
            heavy = 10.0 * max(float(np.trace(gram)), 1e-12)
            weights = _descend(gram + heavy, self.cross + heavy, weights / total, 4 * sweeps)
            weights = weights / max(1.0, weights.sum())
        self.weights = weights


def _descend(gram: Floats, cross: Floats, start: Floats, sweeps: int) -> Floats:
    """Non-negative minimiser of ``w gram w / 2 - cross w``."""
    rows, wanted, weights = gram.tolist(), cross.tolist(), start.tolist()
    for _ in range(sweeps):
        moved = 0.0
        for i, row in enumerate(rows):
            before, own = weights[i], row[i]
            if own > 1e-12:
                pull = wanted[i] - sum(map(mul, row, weights)) + own * before
                weights[i] = after = pull / own if pull > 0.0 else 0.0
            else:
                weights[i] = after = 0.0
            moved += abs(after - before)
        if moved < SETTLED:
            break
    return np.array(weights)


class Guard:
    """Factor on a mixture as served.

    Parameters
    ----------
    sigmas : float
        How many standard errors below the best factor it stays.
    """

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.gain = 0.0  # sum of error of the base times step of the mixture
        self.step = 0.0  # sum of squared steps
        self.noise = 0.0  # sum over groups of their gain, squared: siblings gain and lose together
        self.groups: dict[str, float] = {}  # gain of the latest groups
        self.base = 0.0  # sum of squared errors of the base
        self.factor = 0.0
        self.skill = 0.0

    def add(self, away: Floats, error: Floats, group: str) -> None:
        """A trajectory of a group: how far the served mixture went from the base (N,), and how far the truth was (N,)."""
        gain = float(away @ error)
        self.gain += gain
        self.step += float(away @ away)
        self.base += float(error @ error)
        before = self.groups.pop(group, 0.0) if group else 0.0
        self.noise += gain * (gain + 2.0 * before)
        if group:
            self.groups[group] = before + gain
            if len(self.groups) > GROUPS:
                del self.groups[next(iter(self.groups))]

    def scale(self, factor: float) -> None:
        """Let everything so far weigh ``factor`` times as much."""
        self.gain *= factor
        self.step *= factor
        self.noise *= factor
        self.base *= factor

    def solve(self) -> None:
        """Set factor and skill."""
        if self.step <= 0.0:
            self.factor = self.skill = 0.0
            return
        sure = self.gain - self.sigmas * math.sqrt(max(self.noise, 0.0))
        self.factor = min(1.0, max(0.0, sure / self.step))
        self.skill = self.factor * (2.0 * self.gain - self.factor * self.step) / self.base if self.base > 0 else 0.0


def dump_mixture(mixture: Mixture) -> dict[str, Any]:
    """As values that JSON can hold."""
    return {
        "gram": mixture.gram.tolist(),
        "cross": mixture.cross.tolist(),
        "trajectories": mixture.trajectories,
        "weights": mixture.weights.tolist(),
    }


def load_mixture(mixture: Mixture, dumped: Mapping[str, Any]) -> None:
    """Let ``mixture`` know what was dumped, and nothing else."""
    mixture.gram = np.array(dumped["gram"], dtype=np.float64)
    mixture.cross = np.array(dumped["cross"], dtype=np.float64)
    mixture.trajectories = float(dumped["trajectories"])
    mixture.weights = np.array(dumped["weights"], dtype=np.float64)


def dump_guard(guard: Guard) -> dict[str, Any]:
    """As values that JSON can hold."""
    return {**{name: getattr(guard, name) for name in _GUARD}, "groups": list(guard.groups.items())}


def load_guard(guard: Guard, dumped: Mapping[str, Any]) -> None:
    """Let ``guard`` know what was dumped, and nothing else."""
    for name in _GUARD:
        setattr(guard, name, float(dumped[name]))
    guard.groups = {str(group): float(gain) for group, gain in dumped["groups"]}


_GUARD = ("gain", "step", "noise", "base", "factor", "skill")
