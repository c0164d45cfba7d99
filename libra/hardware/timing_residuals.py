"""Residuals of the cost model: measured over predicted seconds of steps. A simulator draws its noise from them.

The shipped quantiles are of layers predicted by tables without their token counts (`benchmarks.virtual.cost_model`), decode and
prefill separately. They do not include the jitter of the host, which is larger.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError

Array = NDArray[np.float64]

_FILE = Path(__file__).parent / "tables" / "residuals.json"


@dataclass(frozen=True, slots=True)
class Residuals:
    """Distributions of log(measured / predicted), as evenly spaced quantiles.

    Attributes
    ----------
    decode, prefill : tuple of float
        From the smallest to the largest.
    """

    decode: tuple[float, ...]
    prefill: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("decode", "prefill"):
            values = getattr(self, name)
            if len(values) < 2 or any(b < a for a, b in itertools.pairwise(values)):
                raise ConfigError(f"residuals.{name}: got {values!r}; allowed are at least two quantiles in order")

    def decode_factor(self, rng: np.random.Generator, num_steps: int = 1) -> float:
        """Factor on the seconds of ``num_steps`` decode steps in a row, whose deviations are independent."""
        return _mean_factor(self.decode, rng, num_steps)

    def prefill_factor(self, rng: np.random.Generator) -> float:
        """Factor on the seconds of one prefill."""
        return _mean_factor(self.prefill, rng, 1)


def _mean_factor(quantiles: tuple[float, ...], rng: np.random.Generator, num: int) -> float:
    """Mean of ``num`` factors; for more than 32 factors, drawn from the normal distribution of their mean."""
    positions = np.linspace(0.0, 1.0, len(quantiles))
    if num <= 32:
        return float(np.exp(np.interp(rng.random(max(num, 1)), positions, quantiles)).mean())
    middle = np.exp(np.interp((np.arange(512) + 0.5) / 512, positions, quantiles))
    return float(middle.mean() + middle.std() / np.sqrt(num) * rng.standard_normal())


@cache
def shipped_residuals() -> Residuals:
    """The package's residuals (A100 and A800, Llama models)."""
    document = json.loads(_FILE.read_text())
    return Residuals(tuple(document["decode"]), tuple(document["prefill"]))
