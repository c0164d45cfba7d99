"""Least squares of a few positive constants, robust to some points that no form describes. Plain numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OUTLIER = 0.1
"""Log residual beyond which a point's pull stops growing (10 %)."""


def fit_positive(
    residuals: Callable[[Array], Array],
    start: Array,
    *,
    rounds: int = 40,
    outlier: float = OUTLIER,
    tether: float = 0.0,
    ceiling: Array | None = None,
) -> Array:
    """Constants above 0 that make ``residuals`` small: Levenberg-Marquardt on their logarithms, reweighted (Huber).

    Parameters
    ----------
    residuals : callable
        (p,) constants to (n,) residuals, usually log(predicted / measured).
    start : (p,) array
        Above 0. The nearest minimum is found, so that what is known of the constants goes here.
    rounds : int
        Steps taken or refused at most.
    outlier : float
        Residual beyond which it counts linearly.

    tether : float
        Residual, at every point, that moving one constant by a factor e is worth: holds constants that the points say
        nothing about where they were.

    ceiling : (p,) array, optional
        What each constant must stay below; infinite for none. Points that pull beyond it are outweighed.

    Returns
    -------
    (p,) array
        Never worse than ``start``.
    """
    logs = np.log(np.asarray(start, float))

    def cost_of(values: Array) -> float:
        size = np.abs(values)
        return float(np.where(size <= outlier, 0.5 * size**2, outlier * (size - 0.5 * outlier)).sum())

    begin = logs.copy()
    rope = tether * np.sqrt(len(residuals(np.exp(logs)))) if tether else 0.0

    top = np.full(len(logs), np.inf) if ceiling is None else np.log(np.asarray(ceiling, float))
    wall = np.sqrt(len(residuals(np.exp(logs))))

    def tethered(at: Array) -> Array:
        return np.concatenate([residuals(np.exp(at)), rope * (at - begin), wall * np.maximum(0.0, at - top)])

    values = tethered(logs)
    cost, damping = cost_of(values), 1e-2
    for _ in range(rounds):
        weight = np.sqrt(np.minimum(1.0, outlier / np.maximum(np.abs(values), 1e-12)))
        slopes = np.empty((len(values), len(logs)))
        for i in range(len(logs)):
            moved = logs.copy()
            moved[i] += 1e-4
            slopes[:, i] = (tethered(moved) - values) / 1e-4
        slopes *= weight[:, None]
        normal, right = slopes.T @ slopes, slopes.T @ (weight * values)
        scale = np.diag(normal) + 1e-9
        for _ in range(6):
            step = np.clip(np.linalg.solve(normal + damping * np.diag(scale), right), -0.5, 0.5)
            tried = tethered(logs - step)
            tried_cost = cost_of(tried)
            if tried_cost < cost:
                break
            damping *= 5.0
        else:
            break
        gained = cost - tried_cost
        logs, values, cost = logs - step, tried, tried_cost
        damping = max(damping / 5.0, 1e-8)
        if gained < 1e-7 * cost:
            break
    return np.exp(logs)
