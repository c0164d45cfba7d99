"""Learning from trajectories: every expert's coefficients, the mixture's weights, the guard. Takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from libra.policy import snapshots
from libra.policy.posterior import path_residuals
from libra.policy.posterior.compact_rows import Floats, Rows, Table
from libra.policy.posterior.config import PosteriorConfig
from libra.policy.posterior.forecast_columns import OFFSETS, TOKEN_SCALE, WIDTH, matrix
from libra.policy.posterior.mixtures import Guard, Mixture
from libra.policy.posterior.path_residuals import States, Tree
from libra.policy.posterior.ridge import EXPERTS, Sums, solve, targets

_LARGEST_UNIT = 1e6
_LAST, _TREE = OFFSETS["last"], OFFSETS["tree"]


class RunningMean(NamedTuple):
    """A running trajectory with its present forecast (tokens)."""

    rows: Rows
    tokens: int
    order: float
    mean: float


class Learner:
    """Sums over finished trajectories, and the coefficients fitted to them.

    Attributes
    ----------
    final : float array (WIDTH, 4)
        Forecast = columns @ final: log order and mean (thousands of tokens) of progress alone, then of the mixture.
    unit : float
        Weight of one visit in ``states`` and ``tree`` now.
    totals : (float, float)
        Weight of the group's lognormal totals, times their certainty, in the order and in the mean. They are an expert that
        is not fitted: with three siblings known, no linear fit improves them.
    excess : float
        Logarithm of their mean minus their mean logarithm.
    guards : (Guard, Guard)
        Of the order and of the mean.
    """

    def __init__(self, config: PosteriorConfig) -> None:
        self.config = config
        self.states, self.tree, self.unit = States(), Tree(), 1.0
        self.sums = Sums()
        self.mixtures = tuple(Mixture(len(EXPERTS), config.stack_shrink) for _ in range(2))
        self.guards = tuple(Guard(sigmas) for sigmas in config.guard_sigmas)
        self.weights = np.zeros((WIDTH, 2 * len(EXPERTS)))
        self.weights[1, 0::2] = 1.0  # without data: the rest equals what was generated (least attained service first)
        self.weights[0, 1::2] = 1.0
        self.totals = (0.0, 0.0)
        self.excess = 0.0
        self._gaps = [0.0, 0.0]  # returns with known siblings: certainty, and the sum of excesses
        self.final: Floats
        self._mix()

    def published(self) -> None:
        """The weights of the model changed: reduce the weight of everything learned."""
        keep = self.config.version_forget
        self.sums.scale(keep)
        for mixture, guard in zip(self.mixtures, self.guards, strict=True):
            mixture.scale(keep)
            guard.scale(keep)
        self.unit /= keep

    def learn(self, finished: Sequence[tuple[Rows, int, str]], running: Sequence[RunningMean], weight: float) -> None:
        """Add ended trajectories (rows, total tokens, group) and running ones (each with ``weight``), then solve."""
        table = Table([rows for rows, _, _ in finished])
        x = matrix(table)
        for part, (_, total, group) in zip(table.parts, finished, strict=True):
            self._add_ended(table, x, part, total, group)
        if self.unit > _LARGEST_UNIT:
            self.states.scale(1.0 / self.unit)
            self.tree.scale(1.0 / self.unit)
            self.unit = 1.0
        self.tree.prune()
        sums = self.sums.copy()
        if running:
            self._add_running(sums, running, weight)
        self.weights = solve(sums, (self.config.progress_shrink, self.config.signal_shrink), self.config.signals)
        for mixture, guard in zip(self.mixtures, self.guards, strict=True):
            mixture.solve()
            guard.solve()
        self._mix()

    def _fill(self, x: Floats, states: list[int]) -> None:
        """Fill the columns of one trajectory that depend on what was learned: states and paths."""
        x[:, _LAST] = [self.states.residual(state, self.unit) for state in states]
        x[:, _TREE] = self.tree.path(states, self.unit)

    def _add_ended(self, table: Table, columns: Floats, part: slice, total: int, group: str) -> None:
        left = total - table.tokens[part]
        scored = left >= 1.0  # after the last return there is nothing to forecast
        if not scored.any():
            return
        states = table.state[part].tolist()
        self._fill(columns[part], states)
        x, y = columns[part][scored], targets(left[scored])
        predicted = x @ self.weights
        forget = self.config.forget
        served = table.stored[part][scored]
        sure, rest = served[:, 1], served[:, 2]
        for i, value in enumerate((float(sure.sum()), float(sure @ (rest - y[:, 0])))):
            self._gaps[i] = forget * self._gaps[i] + value
        unfitted = (rest - self.excess, np.exp(rest) * TOKEN_SCALE)
        for target, (mixture, guard) in enumerate(zip(self.mixtures, self.guards, strict=True)):
            base = predicted[:, target]
            mixture.scale(forget)
            away = np.column_stack([predicted[:, 2 + target :: 2] - base[:, None], sure * (unfitted[target] - base)])
            mixture.add(away, y[:, target] - base, 1.0)
            then, mixed = served[:, 4 + target], served[:, 6 + target]
            if target:
                then, mixed = np.exp(then) * TOKEN_SCALE, np.exp(mixed) * TOKEN_SCALE
            guard.scale(forget)
            guard.add(mixed - then, y[:, target] - then, group)
        self.unit /= forget
        residuals = (y - predicted[:, :2]).tolist()
        states = table.state[part][scored].tolist()
        self.states.learn(states, residuals, self.unit)
        self.tree.learn(states, residuals, self.unit)
        self.sums.scale(forget)
        self.sums.add(x, y, 1.0)

    def _add_running(self, sums: Sums, running: Sequence[RunningMean], weight: float) -> None:
        """Add running trajectories with their expected totals."""
        table = Table([one.rows for one in running])
        x, y = matrix(table), np.empty((len(table.state), 2))
        for part, one in zip(table.parts, running, strict=True):
            self._fill(x[part], table.state[part].tolist())
            done = one.tokens - table.tokens[part]
            y[part, 0] = done + one.order
            y[part, 1] = (done + one.mean) * TOKEN_SCALE
        np.log(y[:, 0], out=y[:, 0])
        sums.add(x, y, weight, len(running))

    def _mix(self) -> None:
        """One matrix for the base and the mixture of both targets, without the totals."""
        self.final = np.empty((WIDTH, 4))
        for target, mixture in enumerate(self.mixtures):
            base = self.weights[:, target]
            away = self.weights[:, 2 + target :: 2] - base[:, None]
            self.final[:, target] = base
            self.final[:, 2 + target] = base + away @ mixture.weights[:-1]
        self.totals = (float(self.mixtures[0].weights[-1]), float(self.mixtures[1].weights[-1]))
        self.excess = self._gaps[1] / (self._gaps[0] + 10.0)

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {
            "states": path_residuals.dump(self.states.sums),
            "tree": path_residuals.dump(self.tree.sums),
            "gaps": list(self._gaps),
            "sums": self.sums.snapshot(),
            "mixtures": [mixture.snapshot() for mixture in self.mixtures],
            "guards": [guard.snapshot() for guard in self.guards],
        } | snapshots.save(self, ("unit", "weights"))

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        self.states.sums = path_residuals.load(snapshot["states"])
        self.tree.sums = path_residuals.load(snapshot["tree"])
        snapshots.load(self, ("unit", "weights"), snapshot)
        self._gaps = [float(value) for value in snapshot["gaps"]]
        self.sums.restore(snapshot["sums"])
        for mixture, saved in zip(self.mixtures, snapshot["mixtures"], strict=True):
            mixture.restore(saved)
        for guard, saved in zip(self.guards, snapshot["guards"], strict=True):
            guard.restore(saved)
        self._mix()
