"""What a policy asks of a predictor: how many tokens has this trajectory still to generate?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from libra.policy.messages import Event


class Forecast(NamedTuple):
    """Remaining generated tokens of one trajectory, as believed now.

    Attributes
    ----------
    mean_tokens : float
        Expectation, >= 0: what loads are summed from.
    order_tokens : float
        What trajectories are ranked by (e.g. the exponential of the expected logarithm), >= 0.
    skill : float
        Gain of this forecast over the progress-only one, measured on what has finished so far, <= 1; 0 or less: its order
        is not to be trusted.
    """

    mean_tokens: float
    order_tokens: float
    skill: float


class Forecaster(Protocol):
    """Hears every event that the policy hears, in order; deterministic in their sequence."""

    def handle(self, event: Event) -> None:
        """Learn from one event; cheap, the scheduler's loop waits for it."""

    def learn(self) -> None:
        """Do the dear part of learning from what has finished since; called off the critical path."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended."""

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
