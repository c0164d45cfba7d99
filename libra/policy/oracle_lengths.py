"""Forecasts from lengths given beforehand, exact or of a given accuracy; for simulation and comparison."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log, sqrt
from typing import Any

import numpy as np

from libra.facts import Fact, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.forecast import Forecast

OUTRUN_FRAC = 0.1
"""Forecast for a trajectory longer than its given length: this share of what it has generated."""


class KnownLengths:
    """Total generated tokens by key, known from the start; a key that was not given has forecast 0 with skill 0.

    Parameters
    ----------
    totals : mapping of key to tokens
    accuracy : float
        Correlation of the logarithms of forecast and truth, in (0, 1]; 1: the truth. Below, errors are lognormal, and forecasts
        regress to the mean, as calibrated ones do.
    seed : int
        Of the errors.
    """

    def __init__(self, totals: Mapping[str, int] | None = None, *, accuracy: float = 1.0, seed: int = 0) -> None:
        if not 0.0 < accuracy <= 1.0:
            raise ValueError(f"accuracy: got {accuracy}; it is a correlation above 0 and at most 1, e.g. 0.6")
        self._totals = guessed_lengths(dict(sorted((totals or {}).items())), accuracy, seed)
        self._generated: dict[str, int] = {}

    def handle(self, event: Fact) -> None:
        """Count generated tokens."""
        match event:
            case TrajectoryParked(key=key):
                self._generated.setdefault(key, 0)
            case QuantumFinished(key=key, tokens=tokens):
                if key in self._generated:
                    self._generated[key] += tokens
            case TrajectoryEnded(key=key):
                self._generated.pop(key, None)

    def learn(self) -> None:
        """No effect: there is nothing to learn."""

    def remaining(self, key: str) -> Forecast:
        """The remainder of the given length; KeyError for a trajectory that does not run."""
        generated = self._generated[key]
        total = self._totals.get(key)
        if total is None:
            return Forecast(0.0, 0.0, 0.0)
        left = max(total - generated, OUTRUN_FRAC * generated if total < generated else 0.0)
        return Forecast(left, left, 1.0)

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {"totals": self._totals, "generated": dict(sorted(self._generated.items()))}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        self._totals = {str(key): float(total) for key, total in snapshot["totals"].items()}
        self._generated = {str(key): int(tokens) for key, tokens in snapshot["generated"].items()}


def guessed_lengths(totals: Mapping[str, int], accuracy: float, seed: int) -> dict[str, float]:
    """Best predictions whose logarithms correlate with those of ``totals`` by ``accuracy``; their spread is smaller by the
    same factor."""
    if accuracy == 1.0 or not totals:
        return {key: float(total) for key, total in totals.items()}
    logs = np.array([log(1.0 + total) for total in totals.values()])
    mean, spread = float(logs.mean()), float(logs.std())
    noise = np.random.default_rng(seed).standard_normal(len(logs))
    guesses = mean + accuracy * (accuracy * (logs - mean) + sqrt(1.0 - accuracy * accuracy) * spread * noise)
    return {key: exp(float(value)) - 1.0 for key, value in zip(totals, guesses, strict=True)}
