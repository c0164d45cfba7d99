"""Weights of the experts relative to the progress-only forecast, and a guard on their mixture.

Two stages, both fitted to forecasts of trajectories that had not been seen:

1. Weights >= 0, of sum <= 1, that minimise the squared error of ``base + sum(weight * (expert - base))``.
2. A guard in [0, 1] on the mixture *as it was served*: the lower confidence limit of its best factor, so that a gain that
   chance explains counts as zero.

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

from libra.policy import snapshots
from libra.policy.posterior.compact_rows import Floats

GROUPS = 1024
"""Latest groups whose gain is kept, so that siblings count as one observation."""


SETTLED = 1e-12
"""The sweeps end when one changes the sum of all weights by less than this."""
_MIXTURE = ("gram", "cross", "trajectories", "weights")
_GUARD = ("gain", "step", "noise", "base", "factor", "skill")


class Mixture:
    """Weights of the experts for one target.

    Parameters
    ----------
    num_experts : int
    shrink : float
        Weight, in trajectories, of the prior that an expert gains nothing.
    """

    def __init__(self, num_experts: int, shrink: float) -> None:
        self.shrink = shrink
        self.gram = np.zeros((num_experts, num_experts))
        self.cross = np.zeros(num_experts)
        self.trajectories = 0.0
        self.weights = np.zeros(num_experts)

    def add(self, away: Floats, error: Floats, weight: float) -> None:
        """Add a trajectory: difference of each expert to the base (N, experts), and of the truth (N,)."""
        self.gram += weight * (away.T @ away)
        self.cross += weight * (away.T @ error)
        self.trajectories += weight

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        self.gram *= factor
        self.cross *= factor
        self.trajectories *= factor

    def solve(self, sweeps: int = 60) -> None:
        """Fit the weights by coordinate descent from the present ones; a penalty limits their sum to one."""
        gram = self.gram + np.diag(np.diagonal(self.gram) * (self.shrink / max(self.trajectories, 1.0)))
        weights = _descend(gram, self.cross, self.weights, sweeps)
        total = weights.sum()
        if total > 1.0:
            heavy = 10.0 * max(float(np.trace(gram)), 1e-12)
            weights = _descend(gram + heavy, self.cross + heavy, weights / total, 4 * sweeps)
            weights = weights / max(1.0, weights.sum())
        self.weights = weights

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return snapshots.save(self, _MIXTURE)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        snapshots.load(self, _MIXTURE, snapshot)


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
        Standard errors by which it stays below the best factor.
    """

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.gain = 0.0  # sum of (error of the base) x (step of the mixture)
        self.step = 0.0  # sum of squared steps
        self.noise = 0.0  # sum over groups of their gain, squared: siblings gain and lose together
        self.groups: dict[str, float] = {}  # gain of the latest groups
        self.base = 0.0  # sum of squared errors of the base
        self.factor = 0.0
        self.skill = 0.0

    def add(self, away: Floats, error: Floats, group: str) -> None:
        """Add a trajectory of a group: difference of the served mixture to the base (N,), and of the truth (N,)."""
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
        """Multiply the weight of everything so far by ``factor``."""
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

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {**snapshots.save(self, _GUARD), "groups": list(self.groups.items())}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        snapshots.load(self, _GUARD, snapshot)
        self.groups = {str(group): float(gain) for group, gain in snapshot["groups"]}
