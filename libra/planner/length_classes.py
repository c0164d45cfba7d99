"""Classes of trajectories with similar cost on every kind of engine, so that an integer program over classes covers
thousands.

The loads of a trajectory on the kinds are divided by their common scale; a class holds trajectories whose *ratios* are
similar, not their lengths. Within a class, a trajectory of twice the load counts twice, which is exact for a fluid program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libra.planner.planning_problem import Floats, Ints


def ratio_classes(load_s: Floats, allowed: NDArray[np.bool_], max_classes: int, spread: float = 2e-4) -> Ints:
    """Class of each trajectory, (N,), from 0 without holes.

    Parameters
    ----------
    load_s, allowed : arrays (K, N)
        Engine-seconds, and which kinds each trajectory may be on; a class has one such set.
    max_classes : int
        No class is split once there are this many (another set of allowed kinds still adds one).
    spread : float
        A class is not split if its ratios differ by at most this, relatively.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(allowed, np.log(np.maximum(load_s, 1e-300)), 0.0)
    weight = np.exp(logs.max(axis=0, initial=-700.0, where=allowed))
    logs = logs - logs.sum(axis=0) / np.maximum(allowed.sum(axis=0), 1)
    _, pattern = np.unique(allowed, axis=1, return_inverse=True)
    pattern = pattern.reshape(-1)
    parts = [np.flatnonzero(pattern == number) for number in range(int(pattern.max()) + 1)]
    widths = [_widest(logs, allowed, part) for part in parts]
    while len(parts) < max_classes:
        gains = [
            width * float(weight[part].sum()) if width > spread else 0.0
            for part, (width, _) in zip(parts, widths, strict=True)
        ]
        worst = int(np.argmax(gains))
        if gains[worst] <= 0:
            break
        part, (_, axis) = parts[worst], widths[worst]
        values = logs[axis, part]
        low = values <= (values.min() + values.max()) / 2
        parts[worst : worst + 1] = [part[low], part[~low]]
        widths[worst : worst + 1] = [_widest(logs, allowed, part[low]), _widest(logs, allowed, part[~low])]
    class_of = np.zeros(load_s.shape[1], dtype=np.int64)
    for number, part in enumerate(parts):
        class_of[part] = number
    return class_of


def _widest(logs: Floats, allowed: NDArray[np.bool_], part: Ints) -> tuple[float, int]:
    """The largest difference of a part's log ratios over the kinds, and the kind that has it."""
    values = logs[:, part]
    width = np.where(allowed[:, part[0]], values.max(axis=1) - values.min(axis=1), 0.0)
    return float(width.max()), int(width.argmax())
