"""The interface of forecasters of a trajectory's remaining tokens."""

from __future__ import annotations

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
