"""Seconds of a run's trainer, fitted to its own optimizer steps: a step takes ``fixed + tokens x token`` seconds.

Every second step is fitted and the others are predicted from it: the reported error is that of the predicted ones. Times that
are not above 0 are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware.least_squares import fit_positive

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunTrainer:
    """Fitted seconds of a run's training steps.

    Attributes
    ----------
    fixed_s, token_s : float
        Of a step, and of each token it computes.
    error_frac : float
        Mean |predicted / measured - 1| of the steps that were not fitted.
    num_steps : int
    """

    fixed_s: float
    token_s: float
    error_frac: float
    num_steps: int

    def step_s(self, tokens: float) -> float:
        """Seconds of a step over ``tokens`` tokens."""
        return self.fixed_s + self.token_s * tokens


def fit_trainer(seconds: ArrayLike, tokens: ArrayLike) -> RunTrainer | None:
    """The trainer behind these steps; None for fewer than four."""
    spent, num = np.asarray(seconds, float), np.asarray(tokens, float)
    if len(spent) < 4:
        return None
    if not (np.all(spent > 0) and np.all(num > 0)):
        raise ConfigError(
            f"training steps: seconds and tokens must be above 0, got {spent.min()} s, {num.min()} tokens"
        )
    start = np.array([0.1 * float(spent.min()), 0.9 * float(np.median(spent / num))])

    def fitted(chosen: slice) -> Array:
        return fit_positive(
            lambda values: np.log((values[0] + values[1] * num[chosen]) / spent[chosen]),
            start,
            outlier=0.5,
            tether=1e-3,
        )

    half = fitted(slice(0, None, 2))
    error = float(np.abs((half[0] + half[1] * num[1::2]) / spent[1::2] - 1.0).mean())
    fixed_s, token_s = (float(value) for value in fitted(slice(None)))
    return RunTrainer(fixed_s, token_s, error, len(spent))
