"""What a prediction leaves: measured over predicted seconds of steps, to be drawn from where time has to look measured.

A planner takes the prediction; a simulator draws around it. The quantiles that ship are of layers predicted by tables that had not
seen their token counts (`benchmarks.cost_model`), decode and prefill apart. They say nothing of the host, whose jitter is larger.
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
from libra.hardware.seconds import EngineSeconds

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
    """Mean of ``num`` factors; beyond 32 of them the normal law that their mean follows."""
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


@dataclass(frozen=True, slots=True)
class SampledSeconds:
    """`EngineSeconds` around another, each answer drawn with its residual noise.

    Attributes
    ----------
    engine : EngineSeconds
    rng : numpy.random.Generator
        The same seed and the same questions give the same answers.
    residuals : Residuals
    """

    engine: EngineSeconds
    rng: np.random.Generator
    residuals: Residuals

    @property
    def tp(self) -> int:
        """GPUs of the engine."""
        return self.engine.tp

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.engine.kv_capacity_tokens

    def decode_step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Seconds of one step, drawn."""
        return self.engine.decode_step_s(num_sequences, context_tokens) * self.residuals.decode_factor(self.rng)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds of a prefill, drawn."""
        return self.engine.prefill_s(new_tokens, past_tokens) * self.residuals.prefill_factor(self.rng)


def sampled(engine: EngineSeconds, rng: np.random.Generator, residuals: Residuals | None = None) -> SampledSeconds:
    """``engine`` with residual noise; None takes the package's residuals."""
    return SampledSeconds(engine, rng, residuals or shipped_residuals())
