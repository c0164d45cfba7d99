"""Ridge regression from sums: one Gram matrix of all columns, solved for the columns of progress and each signal.

Two targets share it: the logarithm of the remaining tokens (for ranking) and the tokens themselves (for sums of loads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.policy import snapshots
from libra.policy.posterior.compact_rows import Floats
from libra.policy.posterior.forecast_columns import OFFSETS, PROGRESS, SIGNALS, TOKEN_SCALE, WIDTH

EXPERTS = ("progress", *SIGNALS, "joint")
"""Progress alone, progress and one signal, everything."""
_SUMS = ("gram", "cross", "trajectories")


def _columns(expert: str, signals: tuple[str, ...]) -> NDArray[np.int64]:
    chosen = signals if expert == "joint" else (expert,) if expert in signals else ()
    parts = [np.arange(PROGRESS), *(np.arange(WIDTH)[OFFSETS[signal]] for signal in chosen)]
    return np.concatenate(parts)


class Sums:
    """Weighted sums of a regression's normal equations; the constant is column 0."""

    def __init__(self) -> None:
        self.gram = np.zeros((WIDTH, WIDTH))
        self.cross = np.zeros((WIDTH, 2))
        self.trajectories = 0.0

    def add(self, x: Floats, y: Floats, weight: float, trajectories: int = 1) -> None:
        """Add the rows of ``trajectories`` trajectories: ``x`` (N, WIDTH), ``y`` (N, 2) log and thousands of tokens."""
        self.gram += weight * (x.T @ x)
        self.cross += weight * (x.T @ y)
        self.trajectories += weight * trajectories

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        self.gram *= factor
        self.cross *= factor
        self.trajectories *= factor

    def copy(self) -> Sums:
        """A copy of the sums."""
        other = Sums()
        other.gram, other.cross, other.trajectories = self.gram.copy(), self.cross.copy(), self.trajectories
        return other

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return snapshots.save(self, _SUMS)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        snapshots.load(self, _SUMS, snapshot)


def solve(sums: Sums, shrink: tuple[float, float], signals: tuple[str, ...]) -> Floats:
    """Coefficients of every expert, (WIDTH, 2 * experts): log target in the even, thousands of tokens in the odd columns.

    Parameters
    ----------
    sums : Sums
    shrink : (float, float)
        Weight, in trajectories, of the prior that a column has no effect: for progress columns, for all others.
    signals : tuple of str
        The ones allowed.
    """
    weights = np.zeros((WIDTH, 2 * len(EXPERTS)))
    rows = sums.gram[0, 0]
    if rows <= 0.0:
        return weights
    mean = sums.gram[0] / rows
    middle = sums.cross[:] - np.outer(mean, sums.cross[0])  # cross moments about the means
    centred = sums.gram - rows * np.outer(mean, mean)
    variance = np.maximum(np.diagonal(centred), 1e-9 * rows)
    penalty = np.full(WIDTH, shrink[1])
    penalty[:PROGRESS] = shrink[0]
    ridged = centred + np.diag(penalty / max(sums.trajectories, 1.0) * variance + 1e-6 * rows)
    for index, expert in enumerate(EXPERTS):
        chosen = _columns(expert, signals)[1:]
        slopes = np.linalg.solve(ridged[np.ix_(chosen, chosen)], middle[chosen])
        weights[chosen, 2 * index : 2 * index + 2] = slopes
        weights[0, 2 * index : 2 * index + 2] = sums.cross[0] / rows - mean[chosen] @ slopes
    return weights


def targets(remaining: Floats) -> Floats:
    """Both targets of remaining tokens (N,), all at least one: (N, 2)."""
    return np.stack([np.log(remaining), remaining * TOKEN_SCALE], axis=1)
