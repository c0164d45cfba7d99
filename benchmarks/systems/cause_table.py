"""Where GPU-seconds of compared systems go, how old what they train on is, and how long: means and 95 % intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.systems.gpu_seconds import Cause
from benchmarks.systems.pipeline_result import PipelineResult

WIDTH = 15
SHOWN_FROM = 5e-4
"""A cause has a column if a system spends this share of its GPU-seconds on it."""


class Mean(NamedTuple):
    """Mean over seeds, and half the width of its 95 % interval (0 with one seed)."""

    mean: float
    half: float

    @classmethod
    def of(cls, each: Iterable[float]) -> Mean:
        """Of these values."""
        values = np.array([*each])
        half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(float(values.mean()), float(half))


class Went(NamedTuple):
    """Where a system's GPU-seconds went.

    Attributes
    ----------
    gpu_frac : mapping of Cause to Mean
        Shares of all GPU-seconds.
    lag, most_lag : Mean, int
        Versions between a group's first token and its batch.
    trained_frac : Mean
        Gradients of a group that was trained on, over those of any (`PipelineResult.trained_frac`).
    """

    gpu_frac: Mapping[Cause, Mean]
    lag: Mean
    most_lag: int
    trained_frac: Mean

    @classmethod
    def of(cls, results: Sequence[PipelineResult]) -> Went:
        """Of one simulation per seed."""
        return cls(
            {cause: Mean.of(each.gpu_frac()[cause] for each in results) for cause in Cause},
            Mean.of(float(np.mean(each.lags)) for each in results),
            max(max(each.lags) for each in results),
            Mean.of(each.trained_frac for each in results),
        )

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpu_frac": {cause: share.mean for cause, share in self.gpu_frac.items()},
            "gpu_frac_95": {cause: share.half for cause, share in self.gpu_frac.items()},
            "lag": self.lag.mean, "most_lag": self.most_lag,
            "trained_frac": self.trained_frac.mean, "trained_frac_95": self.trained_frac.half,
        }  # fmt: skip


def lines(systems: Mapping[str, Went]) -> list[str]:
    """A header, and a line per system, in percent of its GPUs x seconds; causes that no system has are left out."""
    causes = [cause for cause in Cause if any(went.gpu_frac[cause].mean >= SHOWN_FROM for went in systems.values())]
    columns = [*causes, "trained on", "lag (most)"]
    found = [f"  {'% of GPUs x seconds':21s}" + "".join(f"{column:>{WIDTH}s}" for column in columns)]
    for system, went in systems.items():
        cells = [
            *(f"{100 * went.gpu_frac[cause].mean:.1f} +- {100 * went.gpu_frac[cause].half:.1f}" for cause in causes),
            f"{went.trained_frac.mean:.2f} of all",
            f"{went.lag.mean:.2f} ({went.most_lag})",
        ]
        found.append(f"  {system:21s}" + "".join(f"{cell:>{WIDTH}s}" for cell in cells))
    return found
