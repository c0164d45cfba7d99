"""Forecasts from lengths that are given beforehand: exact ones, and ones of stated accuracy. For simulation and comparison."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log, sqrt
from typing import Any

import numpy as np

from libra.policy.forecast import Forecast
from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked

OUTRUN_FRAC = 0.1
"""A trajectory that has outrun its forecast is believed to have this share of what it has generated left."""


class KnownLengths:
    """Total generated tokens by key, known from the start; what was not given is believed to be as long as the mean.

    Parameters
    ----------
    totals : mapping of key to tokens
    accuracy : float
        Correlation of the logarithm of what is said with that of the truth, in (0, 1]; 1: the truth. Below, what is said
        is the best guess of somebody who sees that well: its errors are lognormal, and it regresses to the mean.
    seed : int
        Of the errors.
    """

    def __init__(self, totals: Mapping[str, int] | None = None, *, accuracy: float = 1.0, seed: int = 0) -> None:
        if not 0.0 < accuracy <= 1.0:
            raise ValueError(f"accuracy: got {accuracy}; it is a correlation above 0 and at most 1, e.g. 0.6")
        self._totals = said_lengths(dict(sorted((totals or {}).items())), accuracy, seed)
        self._generated: dict[str, int] = {}

    def handle(self, event: Event) -> None:
        """Count what is generated."""
        match event:
            case TrajectoryParked(key=key):
                self._generated.setdefault(key, 0)
            case QuantumFinished(key=key, tokens=tokens):
                if key in self._generated:
                    self._generated[key] += tokens
            case TrajectoryEnded(key=key):
                self._generated.pop(key, None)

    def learn(self) -> None:
        """There is nothing to learn."""

    def remaining(self, key: str) -> Forecast:
        """What is left of the length that was given; KeyError for a trajectory that is not under way."""
        generated = self._generated[key]
        total = self._totals.get(key)
        if total is None:
            return Forecast(0.0, 0.0, 0.0)
        left = max(total - generated, OUTRUN_FRAC * generated if total < generated else 0.0)
        return Forecast(left, left, 1.0)

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {"totals": self._totals, "generated": dict(sorted(self._generated.items()))}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._totals = {str(key): float(total) for key, total in snapshot["totals"].items()}
        self._generated = {str(key): int(tokens) for key, tokens in snapshot["generated"].items()}


def said_lengths(totals: Mapping[str, int], accuracy: float, seed: int) -> dict[str, float]:
    """Best guesses whose logarithms correlate with those of ``totals`` by ``accuracy``; their spread is smaller by as much."""
    if accuracy == 1.0 or not totals:
        return {key: float(total) for key, total in totals.items()}
    logs = np.array([log(1.0 + total) for total in totals.values()])
    mean, spread = float(logs.mean()), float(logs.std())
    noise = np.random.default_rng(seed).standard_normal(len(logs))
    said = mean + accuracy * (accuracy * (logs - mean) + sqrt(1.0 - accuracy * accuracy) * spread * noise)
    return {key: exp(float(value)) - 1.0 for key, value in zip(totals, said, strict=True)}
