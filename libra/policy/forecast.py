"""Forecasts of a trajectory's remaining tokens: their interface, and a log of how true they were.

The log follows at most ``FOLLOWED`` running trajectories and keeps ``KEPT`` ended ones. No decision
reads it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from libra.facts import Fact
from libra.policy.saved import Saved


class Forecast(NamedTuple):
    """Forecast of one trajectory's remaining tokens, each >= 0."""

    mean_tokens: float  # expectation, for sums of loads
    order_tokens: float  # for ranking, e.g. exp of the expected logarithm
    skill: float  # gain over the progress-only forecast, <= 1; at 0 its order is not used


class Forecaster(Saved):
    """Receives every event of the policy, in order; deterministic in their sequence."""

    def handle(self, event: Fact) -> None:
        """Learn from one event; must be cheap, because the scheduler's loop waits for it."""

    def learn(self) -> None:
        """Run the expensive update, off the critical path."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended."""
        raise NotImplementedError

    def reconsidered(self, key: str) -> Forecast:
        """`remaining` of a waiting one, updated by its siblings."""
        return self.remaining(key)

    def is_probe(self, key: str) -> bool:
        """Whether it should run ahead of its unknown siblings."""
        return False

    @property
    def skill(self) -> float | None:
        """Measured gain over progress, if it measures any."""
        return None

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each signal, 0 to 1."""
        return {}


FOLLOWED = 512
KEPT = 256


class ForecastOutcome(NamedTuple):
    """An ended trajectory: forecast of its total at the start and half way, and the true total."""

    first_tokens: float
    half_tokens: float
    tokens: int


class CalibrationLog:
    """Forecasts of trajectories that ended, made before their end."""

    def __init__(self) -> None:
        self.outcomes: deque[ForecastOutcome] = deque(maxlen=KEPT)
        self._forecasts: dict[str, list[tuple[int, float]]] = {}  # tokens, forecast of the total

    def forecast(self, key: str, generated_tokens: int, total_tokens: float) -> None:
        forecasts = self._forecasts.get(key)
        if forecasts is None:
            if len(self._forecasts) >= FOLLOWED or generated_tokens:
                return
            forecasts = self._forecasts[key] = []
        if forecasts and forecasts[-1][0] == generated_tokens:
            forecasts[-1] = (generated_tokens, total_tokens)
        else:
            forecasts.append((generated_tokens, total_tokens))

    def ended(self, key: str, tokens: int, *, completed: bool) -> None:
        """``key`` has ended after this many tokens; failures do not count."""
        forecasts = self._forecasts.pop(key, None)
        if forecasts and completed and tokens:
            half = [total for generated, total in forecasts if 2 * generated <= tokens]
            self.outcomes.append(ForecastOutcome(forecasts[0][1], half[-1], tokens))
