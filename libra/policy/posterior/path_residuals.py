"""Mean residuals of the progress-only forecast after a state, and after a path of states.

Residuals, not lengths: a path that matched some turns ago still predicts how far its trajectories depart from their progress,
while the remaining length *there* (to which the paper's tree backs off) would be too long by the tokens generated since.
Differs from the paper's tree also in that a node is shrunk towards its parent by its number of visits, and exists only once its
parent has been visited often enough, which bounds the tree: most paths of real agents occur once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from libra.policy.posterior.compact_rows import Floats

PRIOR_VISITS = 8.0
"""Weight, in visits, of the prior that a state has no effect, or a path none beyond its parent."""
MIN_VISITS = 3.0
"""Visits from which on a path is used, and may have children."""
BACK_OFF = 0.9
"""Factor on the last known path's residual at each return after it."""
MAX_NODES = 40_000
"""Of the tree; beyond it, the least visited are dropped."""
_MODULUS = (1 << 61) - 1

Residual = tuple[float, float]
SILENT: Residual = (0.0, 0.0)


def child(node: int, state: int) -> int:
    """Hash of the path that continues ``node`` with ``state``; 61 bits, the same in every process."""
    return (node * 1_000_003 + state * 7_919 + 12_345) % _MODULUS


class States:
    """Mean residual after each state: [visits, sum of log residuals, sum of token residuals] by state.

    ``unit`` is the weight of one visit now, in both classes: forgetting makes new visits weigh more instead of old ones less.
    """

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}

    def residual(self, state: int, unit: float) -> Residual:
        """(log tokens, thousands of tokens) beyond progress."""
        sums = self.sums.get(state)
        if sums is None:
            return SILENT
        visits = sums[0] + PRIOR_VISITS * unit
        return sums[1] / visits, sums[2] / visits

    def learn(self, states: list[int], residuals: list[list[float]], weight: float) -> None:
        """Add a trajectory."""
        for state, (log, tokens) in zip(states, residuals, strict=True):
            sums = self.sums.setdefault(state, [0.0, 0.0, 0.0])
            sums[0] += weight
            sums[1] += weight * log
            sums[2] += weight * tokens

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        for sums in self.sums.values():
            sums[0] *= factor
            sums[1] *= factor
            sums[2] *= factor


class Tree:
    """Mean residual after each path of states."""

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}

    def residual(self, node: int, parent: Residual, unit: float) -> Residual | None:
        """(log tokens, thousands of tokens) beyond progress; None if the path is not known well enough."""
        sums = self.sums.get(node)
        if sums is None or sums[0] < MIN_VISITS * unit:
            return None
        prior = PRIOR_VISITS * unit
        visits = sums[0] + prior
        return (sums[1] + prior * parent[0]) / visits, (sums[2] + prior * parent[1]) / visits

    def path(self, states: list[int], unit: float) -> Floats:
        """Residuals at every row of a trajectory, (N, 2)."""
        last, node, known = SILENT, 0, True
        out = np.zeros((len(states), 2))
        for row, state in enumerate(states[1:], start=1):
            node = child(node, state)
            found = self.residual(node, last, unit) if known else None
            known = found is not None
            last = (last[0] * BACK_OFF, last[1] * BACK_OFF) if found is None else found
            out[row] = last
        return out

    def learn(self, states: list[int], residuals: list[list[float]], weight: float) -> None:
        """Add a trajectory, down to the first path whose parent is not known well enough."""
        node = 0
        for state, (log, tokens) in zip(states[1:], residuals[1:], strict=True):
            node = child(node, state)
            sums = self.sums.get(node)
            if sums is None:
                sums = self.sums[node] = [0.0, 0.0, 0.0]
            sums[0] += weight
            sums[1] += weight * log
            sums[2] += weight * tokens
            if sums[0] < MIN_VISITS * weight:
                break

    def prune(self) -> None:
        """Keep the most visited half when there are too many nodes; ties by age."""
        if len(self.sums) > MAX_NODES:
            ranked = sorted(self.sums.items(), key=lambda item: -item[1][0])
            self.sums = dict(ranked[: MAX_NODES // 2])

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything so far by ``factor``."""
        for sums in self.sums.values():
            sums[0] *= factor
            sums[1] *= factor
            sums[2] *= factor


def dump(sums: Mapping[int, list[float]]) -> dict[str, Any]:
    """As columns that JSON can hold, in the order of arrival."""
    keys = list(sums)
    return {"keys": keys, "sums": [value for key in keys for value in sums[key]]}


def load(dumped: Mapping[str, Any]) -> dict[int, list[float]]:
    """Inverse of `dump`."""
    values = [float(value) for value in dumped["sums"]]
    return {int(key): values[3 * i : 3 * i + 3] for i, key in enumerate(dumped["keys"])}
