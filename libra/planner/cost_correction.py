"""The cost model corrects itself: factors per phase, learned from what steps really took over what was predicted.

A factor is the exponential of a weighted mean of log ratios, newer steps counting more. The first step counts in full: a
constant error is gone after one. What the ratios still vary by, ``noise_frac``, is what no plan may claim as a gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from libra.errors import PlanError
from libra.planner.snapshot import Corrections

HALF_LIFE_STEPS = 5.0
"""Steps after which an observation counts half: lengths and batches drift within tens of steps."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One phase: weighted sums of the log ratios, of their squares about the factor of their time, and of the weights."""

    weight: float = 0.0
    log_sum: float = 0.0
    error_weight: float = 0.0
    error_sum: float = 0.0
    num_steps: int = 0

    @property
    def factor(self) -> float:
        """Seconds that are realised for each predicted one; 1 where nothing is known."""
        return math.exp(self.log_sum / self.weight) if self.weight else 1.0

    @property
    def noise_frac(self) -> float:
        """Root mean square of log(realised / corrected prediction) since the second step; 0 where nothing is known."""
        return math.sqrt(self.error_sum / self.error_weight) if self.error_weight else 0.0

    def after(self, raw_s: float, realised_s: float, half_life_steps: float = HALF_LIFE_STEPS) -> Learned:
        """What is known after a step that was predicted to take ``raw_s`` without correction and took ``realised_s``."""
        if not (raw_s > 0 and realised_s > 0 and math.isfinite(raw_s) and math.isfinite(realised_s)):
            raise PlanError(f"a step's seconds: predicted {raw_s}, realised {realised_s}; both are positive and finite")
        keep, log = 0.5 ** (1.0 / half_life_steps), math.log(realised_s / raw_s)
        error = (log - math.log(self.factor)) ** 2 if self.num_steps else 0.0
        counts = 1.0 if self.num_steps else 0.0
        return Learned(
            keep * self.weight + 1.0,
            keep * self.log_sum + log,
            keep * self.error_weight + counts,
            keep * self.error_sum + error,
            self.num_steps + 1,
        )


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """What is learned of rollout and training, as values that travel as JSON."""

    rollout: Learned = Learned()
    training: Learned = Learned()

    @property
    def corrections(self) -> Corrections:
        """The factors, for the next snapshot."""
        return Corrections(self.rollout.factor, self.training.factor)

    @property
    def noise_frac(self) -> float:
        """The noisier of the two phases."""
        return max(self.rollout.noise_frac, self.training.noise_frac)

    def after(
        self, raw_rollout_s: float, realised_rollout_s: float, raw_training_s: float, realised_training_s: float
    ) -> CostCorrection:
        """What is known after a step."""
        return CostCorrection(
            self.rollout.after(raw_rollout_s, realised_rollout_s),
            self.training.after(raw_training_s, realised_training_s),
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as JSON can hold it."""
        return {
            name: {key: getattr(getattr(self, name), key) for key in Learned.__slots__}
            for name in ("rollout", "training")
        }

    @classmethod
    def restored(cls, snapshot: Mapping[str, Any]) -> CostCorrection:
        """The correction that ``snapshot`` describes."""
        return replace(cls(), **{name: Learned(**values) for name, values in snapshot.items()})
