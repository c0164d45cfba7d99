"""Ridge regression of the remaining length on all features, with a guard on its gain over progress.

A row of features is ``NUM_ROW`` 32-bit numbers: the columns, the tokens generated so far, and the
forecasts at that time (progress alone: log order, mean; all columns: log order, mean). Two targets
share one Gram matrix: log remaining tokens (for ranking) and remaining tokens (for sums of loads).
`Blend` decides how far to depart from progress alone.

Invariants
----------
1. Without a measured gain the forecast uses progress only, and skill is 0.
2. ``skill <= 1``.
3. Weights and guard are fitted to forecasts of trajectories that had not been learned from.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from libra.policy.saved import Saved
from libra.types import ToolStatus

PROGRESS = 4  # constant, and logarithms of tokens, returns and the last turn's tokens
RETURNS, SURE, SURE_LOG, SURE_TOKENS = 2, PROGRESS + 1, PROGRESS + 2, PROGRESS + 3
"""Certainty of the siblings' totals, and its products with their log remainder and remainder."""
NUM_FEW = PROGRESS + 5  # columns before the tools' counts
TOOL_SLOTS = 24  # tools counted by name, the last slot for all others
DECAY = np.float32(0.85)  # A tool's count after each later return; half-life 4 returns
OUTCOMES = tuple(ToolStatus)  # each but the first, the ordinary one, has a decayed count
_OUTCOME: dict[str, int] = {status: TOOL_SLOTS + number - 1 for number, status in enumerate(OUTCOMES)}
_PAYLOAD = TOOL_SLOTS + len(OUTCOMES) - 1
COUNTED = _PAYLOAD + 2  # decayed counts: tools, outcomes but the first, payload classes; then the last payload's tokens
PAYLOAD_TOKENS = (125, 1250)  # 500 and 5,000 characters, as in the paper's code
WIDTH = NUM_FEW + COUNTED
TOKENS, SERVED = WIDTH, WIDTH + 1
NUM_ROW = SERVED + 4
MAX_BYTES = 257 * 4 * NUM_ROW  # rows of one trajectory to learn from; forecasts continue after them
NO_COUNTS = np.zeros(COUNTED, dtype=np.float32).tobytes()


def counted(counts: bytes, slot: int, status: str, payload_tokens: int) -> bytes:
    """The decayed counts (float32) after one more return of the tool in ``slot``; ValueError."""
    if (outcome := _OUTCOME.get(status)) is None:
        raise ValueError(f"status {status!r} is not a tool outcome; allowed are {', '.join(OUTCOMES)}")
    after = np.frombuffer(counts, dtype=np.float32) * DECAY
    after[slot] += 1.0
    if outcome >= TOOL_SLOTS:
        after[outcome] += 1.0
    if payload_tokens > PAYLOAD_TOKENS[0]:
        after[_PAYLOAD] += 1.0 if payload_tokens <= PAYLOAD_TOKENS[1] else 2.0
    after[_PAYLOAD + 1] = payload_tokens
    return after.tobytes()


class Live(msgspec.Struct, array_like=True, gc=False):
    group: str
    family: str
    rows: bytes | None  # to learn from, if it is followed
    tokens: int = 0  # generated so far
    pending: int = 0  # since the last return
    returns: int = 0
    counts: bytes = NO_COUNTS  # decayed, of its tools' returns
    imputed: float = 0.0  # logarithm of its expected total
    information: float = 0.0  # weight (0..1) of that among its siblings
    mean: float = 0.0  # forecast at its last return
    order: float = 0.0  # forecast at its last return


Floats = NDArray[np.float64]

FORGET = 0.998  # weight of an ended trajectory after each later one
PROGRESS_SHRINK, SIGNAL_SHRINK, STACK_SHRINK = 1.0, 10.0, 3.0
"""Prior that a progress column, a signal column or a share has no effect, in trajectories."""
FIRST_MEAN_TOKENS = 1000.0  # mean forecast before anything has ended
SWEEPS = 60  # sweeps of the coordinate descent that fits the shares
KNOWN_STARTS = 8.0  # starts with known siblings, by certainty, from which their own blends are used
GUARD_SIGMAS = (0.5, 1.0)  # standard errors by which a gain must stand out: order, mean
GROUPS = 1024  # latest groups whose gain is kept, so that siblings count as one observation


class Blend(msgspec.Struct, array_like=True):
    """Departure of one target's forecast from progress alone, and a guard on it.

    ``sums`` has nine entries: five normal equations of the shares, then error x served departure,
    squared departure, squared error, and squared gains of groups.
    """

    sigmas: float  # standard errors by which a gain must stand out
    shares: tuple[float, float] = (0.0, 0.0)  # of regression and siblings' totals; sum <= 1
    factor: float = 0.0  # on the served departure, 0..1: lower confidence limit of the best
    skill: float = 0.0  # share of the squared error of progress that was saved
    sums: tuple[float, ...] = (0.0,) * 9
    groups: dict[str, float] = {}  # gain of the latest groups

    def add(self, joint: Floats, totals: Floats, error: Floats, served: Floats, then: Floats, group: str) -> None:
        """Add a trajectory; all arrays are (N,) differences from a forecast by progress alone.

        ``joint``, ``totals`` and ``error`` differ from the present forecast by progress alone,
        ``served`` and ``then`` from the one made at that time.
        """
        gain = float(served @ then)
        before = self.groups.pop(group, 0.0)
        if group:
            self.groups[group] = before + gain
            if len(self.groups) > GROUPS:
                del self.groups[next(iter(self.groups))]
        shares = (joint @ joint, joint @ totals, totals @ totals, joint @ error, totals @ error)
        more: tuple[Any, ...] = (*shares, gain, served @ served, then @ then, gain * (gain + 2.0 * before))
        self.sums = tuple(before + float(value) for before, value in zip(self.sums, more, strict=True))

    def scale(self, factor: float) -> None:
        self.sums = tuple(factor * value for value in self.sums)

    def solve(self, trajectories: float) -> None:
        a, b, c, p, q, gain, step, base, noise = self.sums
        shrink = 1.0 + STACK_SHRINK / max(trajectories, 1.0)
        self.shares = _shares(shrink * a, b, shrink * c, p, q)
        self.factor = self.skill = 0.0
        if step > 0.0:
            sure = gain - self.sigmas * math.sqrt(max(noise, 0.0))
            self.factor = factor = min(1.0, max(0.0, sure / step))
            self.skill = factor * (2.0 * gain - factor * step) / base if base > 0 else 0.0


def _shares(a: float, b: float, c: float, p: float, q: float) -> tuple[float, float]:
    """Minimiser (v, w) >= 0, v + w <= 1, of ``(a v v + 2 b v w + c w w) / 2 - p v - q w``."""
    first = second = 0.0
    for _ in range(SWEEPS):
        first = _clipped(p - b * second, a)
        second = _clipped(q - b * first, c)
    if first + second > 1.0:  # so the best lies on the edge where they sum to one
        first = _clipped(p - q + c - b, a - 2.0 * b + c)
        second = 1.0 - first
    return first, second


def _clipped(pull: float, step: float) -> float:
    return min(1.0, max(0.0, pull / step)) if step > 1e-12 else 0.0


class Stage(msgspec.Struct, array_like=True):
    """The blends of rows before the first return, or after it.

    Before the first return only siblings tell lengths apart; later a trajectory's own tools may
    tell more. ``excess``: log of the siblings' mean total minus their mean log.
    """

    order: Blend
    mean: Blend
    excess: float = 0.0
    gaps: tuple[float, float] = (0.0, 0.0)  # rows with known siblings: certainty, sum of excesses

    @classmethod
    def new(cls) -> Stage:
        order, mean = GUARD_SIGMAS
        return cls(Blend(order), Blend(mean))

    def add(self, x: Floats, y: Floats, base: Floats, joint: Floats, then: Floats, group: str) -> None:
        """Add a trajectory's rows (N,): columns, truth, both forecasts now, and those made then."""
        if not len(x):
            return
        sure = x[:, SURE]
        known, total = self.gaps
        excess = float((x[:, SURE_LOG] - sure * y[:, 0]).sum())
        self.gaps = FORGET * known + float(sure.sum()), FORGET * total + excess
        totals = np.stack([x[:, SURE_LOG] - sure * self.excess, x[:, SURE_TOKENS]], axis=1) - sure[:, None] * base
        for i, blend in enumerate((self.order, self.mean)):
            now, before = base[:, i], then[:, i]
            away = (joint[:, i] - now, totals[:, i], y[:, i] - now)
            blend.add(*away, then[:, 2 + i] - before, y[:, i] - before, group)

    def scale(self, factor: float) -> None:
        self.order.scale(factor)
        self.mean.scale(factor)

    def solve(self, trajectories: float) -> None:
        self.order.solve(trajectories)
        self.mean.solve(trajectories)
        self.excess = self.gaps[1] / (self.gaps[0] + 10.0)


class Regression(Saved):
    """Sums over ended trajectories, and the coefficients fitted to them.

    Forecasts are ``columns @ weights`` (WIDTH, 4): log order and mean (tokens) of progress alone,
    then of all columns.
    """

    _gram: Floats
    _cross: Floats
    _trajectories: float
    weights: Floats
    first: Stage
    later: Stage

    def __init__(self) -> None:
        super().__init__()
        self._gram, self._cross = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, 2))
        self.weights = np.zeros((WIDTH, 4))
        self.weights[1, 0::2] = 1.0  # without data: least attained service first
        self.weights[0, 1::2] = FIRST_MEAN_TOKENS
        self.first, self.later = Stage.new(), Stage.new()

    def stage(self, returns: int) -> Stage:
        return self.first if not returns and self.first.gaps[0] > KNOWN_STARTS else self.later

    def scale(self, factor: float) -> None:
        self._gram *= factor
        self._cross *= factor
        self._trajectories *= factor
        self.first.scale(factor)
        self.later.scale(factor)

    def add_ended(self, rows: bytes, total: int, group: str) -> None:
        table = table_of(rows)
        left = total - table[:, TOKENS]
        table, left = table[left >= 1.0], left[left >= 1.0]  # no rest to forecast
        if not len(left):
            return
        x, y = table[:, :WIDTH], np.stack([np.log(left), left], axis=1)
        base, joint = np.split(x @ self.weights, 2, axis=1)
        self.scale(FORGET)
        returned = x[:, RETURNS] > 0.0
        for stage, rows_of in ((self.first, ~returned), (self.later, returned)):
            stage.add(x[rows_of], y[rows_of], base[rows_of], joint[rows_of], table[rows_of, SERVED:], group)
        self._gram += x.T @ x
        self._cross += x.T @ y
        self._trajectories += 1.0

    def solve(self, running: list[tuple[bytes, int, float, float]], weight: float) -> None:
        """Fit to ended trajectories and to ``running`` ones, each of the latter with ``weight``."""
        gram, cross, trajectories = self._gram, self._cross, self._trajectories
        for rows, tokens, order, mean in running:
            table = table_of(rows)
            done = tokens - table[:, TOKENS]
            x, y = table[:, :WIDTH], np.stack([np.log(done + order), done + mean], axis=1)
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
            for at, end in ((0, PROGRESS), (2, WIDTH)):
                slopes = np.linalg.solve(ridged[1:end, 1:end], middle[1:end])
                self.weights[1:end, at : at + 2] = slopes
                self.weights[0, at : at + 2] = cross[0] / rows - average[1:end] @ slopes
        self.first.solve(self._trajectories)
        self.later.solve(self._trajectories)


def table_of(rows: bytes) -> Floats:
    return np.frombuffer(rows, dtype=np.float32).reshape(-1, NUM_ROW).astype(np.float64)
