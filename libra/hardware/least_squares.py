"""Least squares of a few positive constants, robust to outliers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEP = 1e-4
"""Finite difference in the logarithm of a constant: rooflines count whole tokens, so a smaller step could change none."""


def fit_positive(
    residuals: Callable[[Array], Array],
    start: Array,
    *,
    outlier: float = 0.1,
    tether: float = 0.0,
    ceiling: Array | None = None,
) -> Array:
    """Constants above 0 that make ``residuals`` small under Huber's loss: a local minimum near ``start``, never worse than it.

    Parameters
    ----------
    residuals : callable
        (p,) constants to (n,) residuals, usually log(predicted / measured).
    start : (p,) array
        Above 0.
    outlier : float
        Residual beyond which the loss grows linearly.
    tether : float
        Penalty of moving one constant by a factor e, as a residual at every point. It keeps constants that the points do
        not determine near ``start``.
    ceiling : (p,) array, optional
        Upper bounds; infinite for none.
    """
    from scipy.optimize import least_squares  # takes most of a second to import; only fits need it

    begin = np.log(np.asarray(start, float))
    top = np.full(len(begin), np.inf) if ceiling is None else np.log(np.asarray(ceiling, float))
    rope = tether * np.sqrt(len(residuals(np.exp(begin))))

    def tethered(logs: Array) -> Array:
        return np.concatenate([residuals(np.exp(logs)), rope * (logs - begin)])

    def slopes(logs: Array) -> Array:
        here = tethered(logs)
        return np.stack([(tethered(logs + moved) - here) / STEP for moved in STEP * np.eye(len(logs))], axis=1)

    found = least_squares(
        tethered, np.minimum(begin, top), slopes, bounds=(-np.inf, top), loss="huber", f_scale=outlier, x_scale="jac"
    )
    return np.asarray(np.exp(found.x))
