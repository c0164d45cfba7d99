"""Other answers to the same question, behind the same seam: what every table compares the posterior with.

`GlobalMean`, `TurnIndex` and `PaperTree` learn; `LengthPredictor` and `OraclePosterior` know the truth, for simulations and
benchmarks only. Progress alone and each signal alone are a `Posterior` with other dials; see `FORECASTERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from libra.errors import ConfigError
from libra.policy.forecast import Forecast, Forecaster
from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.posterior.columns import SIGNALS
from libra.policy.posterior.config import PosteriorConfig
from libra.policy.posterior.forecaster import Posterior
from libra.policy.posterior.paper_tree import PaperTree
from libra.policy.posterior.progress_table import Track, Tracker

LAST_TURN = 100
"""Turns from here on share a mean."""
PRIOR_ROWS = 20.0
"""Rows' worth of belief that a turn is like all others."""


class GlobalMean(Tracker):
    """The mean remaining length over all returns so far, whatever the trajectory."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = [0.0, 0.0, 0.0]

    def _learn(self, track: Track) -> None:
        for tokens in track.marks:
            left = track.tokens - tokens
            if left >= 1:
                for i, value in enumerate((1.0, left, math.log(left))):
                    self._sums[i] += value

    def _forecast(self, track: Track) -> Forecast:
        rows, tokens, logs = self._sums
        return Forecast(tokens / rows, math.exp(logs / rows), 0.0) if rows else Forecast(1.0, 1.0, 0.0)

    def _learned(self) -> Any:
        return list(self._sums)

    def _load(self, learned: Any) -> None:
        self._sums = [float(value) for value in learned]


class TurnIndex(Tracker):
    """The mean remaining length after as many turns, drawn towards the global mean."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = [[0.0, 0.0, 0.0] for _ in range(LAST_TURN + 1)]
        self._all = [0.0, 0.0, 0.0]

    def _learn(self, track: Track) -> None:
        for turn, tokens in enumerate(track.marks):
            left = track.tokens - tokens
            if left >= 1:
                for sums in (self._sums[min(turn, LAST_TURN)], self._all):
                    for i, value in enumerate((1.0, left, math.log(left))):
                        sums[i] += value

    def _forecast(self, track: Track) -> Forecast:
        rows, tokens, logs = self._all
        if not rows:
            return Forecast(1.0, 1.0, 0.0)
        here = self._sums[min(len(track.marks) - 1, LAST_TURN)]
        visits = here[0] + PRIOR_ROWS
        mean = (here[1] + PRIOR_ROWS * tokens / rows) / visits
        return Forecast(mean, math.exp((here[2] + PRIOR_ROWS * logs / rows) / visits), 0.0)

    def _learned(self) -> Any:
        return {"turns": [list(sums) for sums in self._sums], "all": list(self._all)}

    def _load(self, learned: Any) -> None:
        self._sums = [[float(value) for value in sums] for sums in learned["turns"]]
        self._all = [float(value) for value in learned["all"]]


class LengthPredictor:
    """A predictor of the total length, made before the first token and as good as asked for.

    The logarithm of what it predicts correlates with that of the truth by ``accuracy`` (over the trajectories it was given).

    Parameters
    ----------
    truth : mapping of key to total tokens
    accuracy : float
        Correlation, above 0 to 1 (1 is the truth).
    rng : numpy Generator
        Of the noise, drawn once for all keys in sorted order.

    Raises
    ------
    ConfigError
        The accuracy is outside.
    """

    def __init__(self, truth: Mapping[str, int], accuracy: float, rng: np.random.Generator) -> None:
        if not 0.0 < accuracy <= 1.0:
            raise ConfigError(f"LengthPredictor: accuracy {accuracy}; it is a correlation above 0, up to 1, e.g. 0.7")
        self.accuracy = accuracy
        keys = sorted(truth)
        logs = np.log([max(truth[key], 1) for key in keys])
        spread = float(logs.std()) * math.sqrt(1.0 / accuracy**2 - 1.0) if keys else 0.0
        # drawn back towards the mean, as a calibrated forecast of a noisy signal is
        middle = float(logs.mean()) if keys else 0.0
        noisy = middle + accuracy**2 * (logs + rng.normal(0.0, 1.0, len(keys)) * spread - middle)
        self.totals = dict(zip(keys, np.exp(noisy).tolist(), strict=True))
        self._done: dict[str, int] = {}

    def handle(self, event: Event) -> None:
        """Count what has been generated."""
        match event:
            case TrajectoryParked(key=key):
                self._done.setdefault(key, 0)
            case QuantumFinished(key=key, tokens=tokens) if key in self._done:
                self._done[key] += tokens
            case TrajectoryEnded(key=key):
                self._done.pop(key, None)

    def learn(self) -> None:
        """It learns nothing."""

    def remaining(self, key: str) -> Forecast:
        """What it predicted less what was generated, at least a tenth of the prediction; KeyError as the seam says."""
        done, total = self._done[key], self.totals[key]
        left = max(total - done, 0.1 * total, 1.0) if self.accuracy < 1.0 else max(total - done, 0.0)
        return Forecast(left, left, self.accuracy**2)

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {"accuracy": self.accuracy, "totals": dict(self.totals), "done": dict(self._done)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self.accuracy = float(snapshot["accuracy"])
        self.totals = {str(key): float(total) for key, total in snapshot["totals"].items()}
        self._done = {str(key): int(tokens) for key, tokens in snapshot["done"].items()}


class OraclePosterior(LengthPredictor):
    """The truth.

    Parameters
    ----------
    truth : mapping of key to total tokens
    """

    def __init__(self, truth: Mapping[str, int]) -> None:
        super().__init__(truth, 1.0, np.random.default_rng(0))
        self.totals = {key: float(tokens) for key, tokens in truth.items()}


def _with(*signals: str) -> Callable[[], Forecaster]:
    return lambda: Posterior(PosteriorConfig(signals=signals))


FORECASTERS: dict[str, Callable[[], Forecaster]] = {
    "global_mean": GlobalMean,
    "turn_index": TurnIndex,
    "progress": _with(),
    "paper_tree": PaperTree,
    **{signal: _with(signal) for signal in SIGNALS},
    "posterior": Posterior,
}
"""Every forecaster that learns, by name; those of one signal rest on progress and on it."""
