"""Where the GPU-seconds of compared systems go: shares by cause, mean and 95 % interval over seeds, as rows and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from libra.sim.gpu_seconds import Cause

WIDTH = 15
SHOWN_FROM = 5e-4
"""A cause has a column if a system spends this share of its GPU-seconds on it."""


class Share(NamedTuple):
    """Mean over seeds, and half the width of its 95 % interval (0 with one seed)."""

    mean: float
    half: float


def shares_of(each_seed: Sequence[Mapping[Cause, float]]) -> dict[Cause, Share]:
    """Shares of all GPU-seconds by cause, from those of each seed (`PipelineResult.gpu_frac`)."""
    found = {}
    for cause in Cause:
        values = np.array([seed[cause] for seed in each_seed])
        half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        found[cause] = Share(float(values.mean()), float(half))
    return found


def lines(systems: Mapping[str, Mapping[Cause, Share]]) -> list[str]:
    """A header, and a line per system, in percent of its GPUs x seconds; causes that no system has are left out."""
    causes = [cause for cause in Cause if any(shares[cause].mean >= SHOWN_FROM for shares in systems.values())]
    found = [f"  {'% of GPUs x seconds':21s}" + "".join(f"{cause:>{WIDTH}s}" for cause in causes)]
    for system, shares in systems.items():
        cells = (f"{100 * shares[cause].mean:.1f} +- {100 * shares[cause].half:.1f}" for cause in causes)
        found.append(f"  {system:21s}" + "".join(f"{cell:>{WIDTH}s}" for cell in cells))
    return found
