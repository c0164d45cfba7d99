"""Ridge regression of the remaining length on all features, and a guard on what it adds to progress alone.

Two targets share one Gram matrix: the logarithm of the remaining tokens (for ranking) and the tokens themselves (for sums of
loads). Progress columns alone give the reference forecast, all columns the joint one; `Blend` decides how far to depart from the
reference.

Invariants
----------
1. With nothing measured, or nothing gained, the forecast is the progress-only one and skill is 0.
2. ``skill <= 1``.
3. Weights and guard are fitted to forecasts of trajectories that were not learned from.
"""

from __future__ import annotations

import math
import numpy as np
from numpy.typing import NDArray

from libra.policy.posterior.features import (
    KILO,
    NUM_ROW,
    PROGRESS,
    SERVED,
    SURE,
    SURE_LOG,
    SURE_TOKENS,
    TOKENS,
    WIDTH,
    columns_of,
)
from libra.policy.snapshots import Saved

Floats = NDArray[np.float64]

FORGET = 0.998
"""Weight of an ended trajectory after each later one."""
PROGRESS_SHRINK, SIGNAL_SHRINK, STACK_SHRINK = 1.0, 10.0, 3.0
"""Weight, in trajectories, of the prior that a column of progress, a column of a signal, a share have no effect."""
GUARD_SIGMAS = (0.5, 1.0)
"""Standard errors by which a gain must stand out: in the order, and in the mean, whose errors have the heavier tail."""
GROUPS = 1024
"""Latest groups whose gain is kept, so that siblings count as one observation."""


class Blend(Saved):
    """Departure of one target's forecast from progress alone: towards the regression and the siblings' totals, and a guard on it.

    Attributes
    ----------
    shares : (float, float)
        Weights of the regression, and of the lognormal totals of siblings times their certainty: >= 0, of sum <= 1.
    factor : float
        Factor on the departure *as served*, 0..1: the lower confidence limit of its best factor, so that a gain that chance
        explains counts as zero.
    skill : float
        Share of the squared error of progress alone that the served forecast saved.
    """

    SAVED = {
        "shares": tuple[float, float],
        "_gram": np.ndarray,
        "_cross": np.ndarray,
        "_groups": dict[str, float],
    } | dict.fromkeys(("factor", "skill", "_gain", "_step", "_noise", "_base"), float)

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.shares = (0.0, 0.0)
        self.factor = self.skill = 0.0
        self._gram = np.zeros((2, 2))
        self._cross = np.zeros(2)
        self._gain = 0.0  # sum of (error of progress alone) x (served departure)
        self._step = 0.0  # sum of squared departures
        self._noise = 0.0  # sum over groups of their gain, squared: siblings gain and lose together
        self._base = 0.0  # sum of squared errors of progress alone
        self._groups: dict[str, float] = {}  # gain of the latest groups

    def compare(self, away: Floats, error: Floats) -> None:
        """Add a trajectory: difference of both forecasts to progress alone (N, 2), and of the truth (N,)."""
        self._gram += away.T @ away
        self._cross += away.T @ error

    def served(self, away: Floats, error: Floats, group: str) -> None:
        """Score a trajectory of a group: difference of its served departures (N,) and of the truth (N,) to progress alone."""
        gain = float(away @ error)
        self._gain += gain
        self._step += float(away @ away)
        self._base += float(error @ error)
        before = self._groups.pop(group, 0.0) if group else 0.0
        self._noise += gain * (gain + 2.0 * before)
        if group:
            self._groups[group] = before + gain
            if len(self._groups) > GROUPS:
                del self._groups[next(iter(self._groups))]

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        self._gram *= factor
        self._cross *= factor
        self._gain *= factor
        self._step *= factor
        self._noise *= factor
        self._base *= factor

    def solve(self, trajectories: float) -> None:
        """Set shares, factor and skill."""
        shrink = 1.0 + STACK_SHRINK / max(trajectories, 1.0)
        self.shares = _shares(self._gram + np.diag(np.diagonal(self._gram) * (shrink - 1.0)), self._cross)
        if self._step <= 0.0:
            self.factor = self.skill = 0.0
            return
        sure = self._gain - self.sigmas * math.sqrt(max(self._noise, 0.0))
        self.factor = factor = min(1.0, max(0.0, sure / self._step))
        self.skill = factor * (2.0 * self._gain - factor * self._step) / self._base if self._base > 0 else 0.0


def _shares(gram: Floats, cross: Floats) -> tuple[float, float]:
    """Minimiser of ``w gram w / 2 - cross w`` over weights >= 0 of sum <= 1: inside the triangle, or on one of its edges."""
    (a, b), (_, c) = gram.tolist()
    p, q = cross.tolist()
    inside = a * c - b * b
    if inside > 1e-12 * a * c:
        first, second = (c * p - b * q) / inside, (a * q - b * p) / inside
        if min(first, second) >= 0.0 and first + second <= 1.0:
            return first, second
    along = _clipped(p - b - q + c, a - 2.0 * b + c)
    edges = ((_clipped(p, a), 0.0), (0.0, _clipped(q, c)), (along, 1.0 - along))
    return min(edges, key=lambda w: 0.5 * (a * w[0] * w[0] + 2.0 * b * w[0] * w[1] + c * w[1] * w[1]) - p * w[0] - q * w[1])


def _clipped(pull: float, step: float) -> float:
    return min(1.0, max(0.0, pull / step)) if step > 1e-12 else 0.0


class Regression(Saved):
    """Sums over ended trajectories, and the coefficients fitted to them.

    Parameters
    ----------
    signals : tuple of str
        The ones allowed in the joint forecast.

    Attributes
    ----------
    weights : float array (WIDTH, 4)
        Forecast = columns @ weights: log order and mean (thousands of tokens) of progress alone, then of all columns.
    excess : float
        Logarithm of the siblings' mean totals minus their mean logarithm.
    order, mean : Blend
    """

    SAVED = {
        "_gram": np.ndarray,
        "_cross": np.ndarray,
        "_trajectories": float,
        "_gaps": list[float],
        "weights": np.ndarray,
        "excess": float,
        "order": Blend,
        "mean": Blend,
    }

    def __init__(self, signals: tuple[str, ...]) -> None:
        self._columns = (np.arange(1, PROGRESS), columns_of(signals))
        self._gram = np.zeros((WIDTH, WIDTH))
        self._cross = np.zeros((WIDTH, 2))
        self._trajectories = 0.0
        self._gaps = [0.0, 0.0]  # returns with known siblings: certainty, and the sum of excesses
        self.weights = np.zeros((WIDTH, 4))
        self.weights[1, 0::2] = 1.0  # without data: the rest equals what was generated (least attained service first)
        self.weights[0, 1::2] = 1.0
        self.excess = 0.0
        self.order, self.mean = (Blend(sigmas) for sigmas in GUARD_SIGMAS)

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        self._gram *= factor
        self._cross *= factor
        self._trajectories *= factor
        self.order.scale(factor)
        self.mean.scale(factor)

    def add_ended(self, rows: bytes, total: int, group: str) -> None:
        """Add an ended trajectory: its rows (`features`), its tokens and its group."""
        table = table_of(rows)
        left = total - table[:, TOKENS]
        table, left = table[left >= 1.0], left[left >= 1.0]  # after the last return there is nothing to forecast
        if not len(left):
            return
        x, y = table[:, :WIDTH], np.stack([np.log(left), left * KILO], axis=1)
        base, joint = np.split(x @ self.weights, 2, axis=1)
        sure, then = x[:, SURE], table[:, SERVED:]
        self._gaps[0] = FORGET * self._gaps[0] + float(sure.sum())
        self._gaps[1] = FORGET * self._gaps[1] + float((x[:, SURE_LOG] - sure * y[:, 0]).sum())
        totals = np.stack([x[:, SURE_LOG] - sure * self.excess, x[:, SURE_TOKENS]], axis=1) - sure[:, None] * base
        self.scale(FORGET)
        for i, blend in enumerate((self.order, self.mean)):
            blend.compare(np.stack([joint[:, i] - base[:, i], totals[:, i]], axis=1), y[:, i] - base[:, i])
            blend.served(then[:, 2 + i] - then[:, i], y[:, i] - then[:, i], group)
        self._gram += x.T @ x
        self._cross += x.T @ y
        self._trajectories += 1.0

    def solve(self, running: list[tuple[bytes, int, float, float]], weight: float) -> None:
        """Fit everything to ended trajectories and to running ones (rows, tokens, order, mean), each with ``weight``."""
        gram, cross, trajectories = self._gram, self._cross, self._trajectories
        for rows, tokens, order, mean in running:
            table = table_of(rows)
            done = tokens - table[:, TOKENS]
            x, y = table[:, :WIDTH], np.stack([np.log(done + order), (done + mean) * KILO], axis=1)
            gram = gram + weight * (x.T @ x)
            cross = cross + weight * (x.T @ y)
            trajectories += weight
        rows = gram[0, 0]
        if rows > 0.0:
            average = gram[0] / rows
            middle = cross - np.outer(average, cross[0])  # cross moments about the means
            centred = gram - rows * np.outer(average, average)
            penalty = np.full(WIDTH, SIGNAL_SHRINK)
            penalty[:PROGRESS] = PROGRESS_SHRINK
            variance = np.maximum(np.diagonal(centred), 1e-9 * rows)
            ridged = centred + np.diag(penalty / max(trajectories, 1.0) * variance + 1e-6 * rows)
            self.weights[:] = 0.0
            for at, chosen in zip((0, 2), self._columns, strict=True):
                slopes = np.linalg.solve(ridged[np.ix_(chosen, chosen)], middle[chosen])
                self.weights[chosen, at : at + 2] = slopes
                self.weights[0, at : at + 2] = cross[0] / rows - average[chosen] @ slopes
        self.order.solve(self._trajectories)
        self.mean.solve(self._trajectories)
        self.excess = self._gaps[1] / (self._gaps[0] + 10.0)


def table_of(rows: bytes) -> Floats:
    """Rows of a trajectory as an array (N, NUM_ROW)."""
    return np.frombuffer(rows, dtype=np.float32).reshape(-1, NUM_ROW).astype(np.float64)
