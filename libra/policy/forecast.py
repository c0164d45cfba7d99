"""The interface of forecasters of a trajectory's remaining tokens.

Forecasts of finished trajectories and their true lengths, for the dashboard; no decision reads it.

Invariants
----------
1. At most ``FOLLOWED`` running trajectories and ``KEPT`` ended ones are kept, whatever the size of the run.
2. Only forecasts made *before* the end count.

"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from libra.facts import Fact


class Forecast(NamedTuple):
    """Forecast of one trajectory's remaining tokens.

    Attributes
    ----------
    mean_tokens : float
        Expectation, >= 0: for sums of loads.
    order_tokens : float
        For ranking (e.g. the exponential of the expected logarithm), >= 0.
    skill : float
        Gain over the progress-only forecast, measured on ended trajectories, <= 1; 0 or less: do not use its order.
    """

    mean_tokens: float
    order_tokens: float
    skill: float


class Forecaster(Protocol):
    """Receives every event of the policy, in order; deterministic in their sequence."""

    def handle(self, event: Fact) -> None:
        """Learn from one event; must be cheap, because the scheduler's loop waits for it."""

    def learn(self) -> None:
        """Run the expensive update on trajectories that ended since the last call; called off the critical path."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended."""

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""


FOLLOWED = 512
"""Trajectories followed at once: each new one while there is room."""
KEPT = 256
"""Finished trajectories that are kept: the latest."""


class ForecastOutcome(NamedTuple):
    """An ended trajectory: forecast of its total tokens at the start and half way, and the true total."""

    first_tokens: float
    half_tokens: float
    tokens: int


class CalibrationLog:
    """Follows forecasts of some trajectories until they end."""

    def __init__(self) -> None:
        self.outcomes: deque[ForecastOutcome] = deque(maxlen=KEPT)
        self._forecasts: dict[str, list[tuple[int, float]]] = {}  # tokens generated, forecast of the total

    def forecast(self, key: str, generated_tokens: int, total_tokens: float) -> None:
        """``key`` has generated this many tokens; the forecast of its total is ``total_tokens``."""
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
        """``key`` has ended after this many tokens; if it failed, its length does not count."""
        forecasts = self._forecasts.pop(key, None)
        if forecasts and completed and tokens:
            half = [total for generated, total in forecasts if 2 * generated <= tokens]
            self.outcomes.append(ForecastOutcome(forecasts[0][1], half[-1], tokens))
