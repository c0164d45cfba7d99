"""What was believed of trajectories that are over, beside what they turned out to be; for people, no decision reads it.

Invariants
----------
1. At most ``FOLLOWED`` living trajectories and ``KEPT`` finished ones are held, whatever the size of the run.
2. Only what was believed *before* counts: nothing is looked up after the end.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FOLLOWED = 512
"""Trajectories followed at once: the first that come while there is room."""
KEPT = 256
"""Finished ones that are shown: the latest."""


class ForecastOutcome(NamedTuple):
    """A finished trajectory: tokens in all as believed when it began, as believed half way, and as they were."""

    first_tokens: float
    half_tokens: float
    tokens: int


class CalibrationLog:
    """Follows beliefs about some trajectories until they are over."""

    def __init__(self) -> None:
        self.outcomes: deque[ForecastOutcome] = deque(maxlen=KEPT)
        self._beliefs: dict[str, list[tuple[int, float]]] = {}  # tokens generated, tokens believed in all

    def believed(self, key: str, generated_tokens: int, total_tokens: float) -> None:
        """``key`` has generated so many tokens and is believed to come to ``total_tokens``."""
        beliefs = self._beliefs.get(key)
        if beliefs is None:
            if len(self._beliefs) >= FOLLOWED or generated_tokens:
                return
            beliefs = self._beliefs[key] = []
        if beliefs and beliefs[-1][0] == generated_tokens:
            beliefs[-1] = (generated_tokens, total_tokens)
        else:
            beliefs.append((generated_tokens, total_tokens))

    def ended(self, key: str, tokens: int, *, completed: bool) -> None:
        """``key`` is over after so many tokens; where it failed, its length says nothing."""
        beliefs = self._beliefs.pop(key, None)
        if beliefs and completed and tokens:
            half = [total for generated, total in beliefs if 2 * generated <= tokens]
            self.outcomes.append(ForecastOutcome(beliefs[0][1], half[-1], tokens))
