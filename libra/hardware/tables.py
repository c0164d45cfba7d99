"""Measurements of one GPU as ratios to the rooflines, interpolated in logarithms.

1. At a measured point a table returns the measurement; between two points the ratio lies between
   theirs; beyond the last point the nearest ratio holds.
2. An unmeasured shape of a matrix product or elementwise operator is corrected by near shapes, else
   not at all.
3. Attention tables apply only to their own head counts and head length: kernels differ too much.
4. All-reduce is a table of seconds by number of workers and workers per machine.
5. The residuals of the tables are the simulator's noise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.hardware.gpus import GPU, load_gpu
from libra.hardware.layer_seconds import MOVES, Efficiencies, activation_bytes, gemm_columns_inner
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]

NEAR = 0.25
"""Distance in log size at which another shape's correction weighs 60 %."""
DOUBT = 0.1
"""Weight of no correction, where a shape at distance 0 has weight 1."""


@dataclass(frozen=True, slots=True)
class RatioCurve:
    """Measured over predicted seconds of one operator of one size, by tokens (n,).

    ``sizes``: columns and inner length of a matrix product, or bytes per token of an elementwise
    operator.
    """

    operator: str
    sizes: tuple[float, ...]
    log_tokens: Array
    log_ratio: Array


@dataclass(frozen=True, slots=True)
class RatioRows:
    """Measured over predicted seconds by two numbers, in rows of unequal length.

    ``log_x`` (rows,) strictly increases; each row has the second number on the `log_tokens` scale,
    and the log ratio. ``key``: heads, key-value heads and head length on one GPU.
    """

    key: tuple[float, ...]
    log_x: Array
    rows: tuple[tuple[Array, Array], ...]

    def log_ratio(self, x: Array, y: Array) -> Array:
        """Log ratio at points: interpolated along the two nearest rows, then between them."""
        log_x, log_y = np.log(x), log_tokens(y)
        shape = log_x.shape
        log_x, log_y = log_x.ravel(), log_y.ravel()
        along = np.stack([np.interp(log_y, at, values) for at, values in self.rows])
        if len(self.log_x) == 1:
            return np.asarray(along[0].reshape(shape))
        i = np.clip(np.searchsorted(self.log_x, log_x, side="right") - 1, 0, len(self.log_x) - 2)
        share = np.clip((log_x - self.log_x[i]) / (self.log_x[i + 1] - self.log_x[i]), 0.0, 1.0)
        points = np.arange(len(log_x))
        return np.asarray(((1.0 - share) * along[i, points] + share * along[i + 1, points]).reshape(shape))


@dataclass(frozen=True, slots=True)
class AllReduceTable:
    """Seconds of an all-reduce by bytes: log-linear, and at the last rate beyond the end."""

    workers: int
    workers_per_node: int
    log_bytes: Array
    log_seconds: Array

    def seconds(self, num_bytes: Array) -> Array:
        """Seconds for ``num_bytes``."""
        log_size = np.log(np.maximum(num_bytes, 1.0))
        beyond = np.maximum(0.0, log_size - self.log_bytes[-1])
        return np.asarray(np.exp(np.interp(log_size, self.log_bytes, self.log_seconds) + beyond))


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one GPU; the ratios refer to rooflines with these ``efficiencies``."""

    gpu: GPU
    efficiencies: Efficiencies
    linear: tuple[RatioCurve, ...] = ()
    decode: tuple[RatioRows, ...] = ()
    prefill: tuple[RatioRows, ...] = ()
    all_reduce: tuple[AllReduceTable, ...] = ()

    def of(self, shape: ModelShape) -> ShapeTables:
        """Corrections for one model."""
        return ShapeTables(self, shape)


@dataclass(frozen=True, slots=True)
class ShapeTables:
    """Corrections from `Tables` for one model."""

    tables: Tables
    shape: ModelShape
    _found: dict[tuple[str, int], tuple[tuple[float, RatioCurve], ...]] = field(default_factory=dict)

    def ratio(self, operator: str, tp: int, tokens: Array) -> Array:
        """Measured over predicted seconds of an operator."""
        key, at = (operator, tp), np.log(np.maximum(np.asarray(tokens, float), 1.0))
        if key not in self._found:
            self._found[key] = _near(self.tables.linear, operator, operator_sizes(operator, self.shape, tp))
        total = sum(weight * np.interp(at, curve.log_tokens, curve.log_ratio) for weight, curve in self._found[key])
        return np.asarray(np.exp(total + np.zeros_like(at)))

    def decode_ratio(self, num_sequences: Array, mean_context: Array, tp: int) -> Array:
        """Measured over predicted seconds of a decode step's attention."""
        return self._attention(self.tables.decode, num_sequences, mean_context, tp)

    def prefill_ratio(self, new_tokens: Array, past_tokens: Array, tp: int) -> Array:
        """Measured over predicted seconds of a chunk's attention."""
        return self._attention(self.tables.prefill, new_tokens, past_tokens, tp)

    def all_reduce_s(self, num_bytes: Array, workers: int, workers_per_node: int) -> Array | None:
        """Seconds from the table for this number of workers; None without a table."""
        for table in self.tables.all_reduce:
            if (table.workers, table.workers_per_node) == (workers, workers_per_node):
                return table.seconds(num_bytes)
        return None

    def _attention(self, rows: Sequence[RatioRows], x: Array, y: Array, tp: int) -> Array:
        wanted = attention_key(self.shape, tp)
        for table in rows:
            if table.key == wanted:
                return np.asarray(np.exp(table.log_ratio(np.asarray(x, float), np.asarray(y, float))))
        return np.ones(np.shape(x))


def attention_key(shape: ModelShape, tp: int) -> tuple[float, ...]:
    """Sizes that select an attention kernel: heads, key-value heads and head length, on one GPU."""
    return (shape.num_heads / tp, float(shape.kv_heads_per_gpu(tp)), float(shape.head_dim))


def log_tokens(tokens: Array) -> Array:
    """Tokens on the log scale of attention tables."""
    return np.asarray(np.log(np.asarray(tokens, float) + 64.0))


def operator_sizes(operator: str, shape: ModelShape, tp: int) -> tuple[float, ...]:
    """Sizes of an operator, as in `RatioCurve.sizes`."""
    if operator in MOVES:
        return (activation_bytes(operator, shape, tp),)
    return gemm_columns_inner(operator, shape, tp)


def _near(
    curves: Sequence[RatioCurve], operator: str, sizes: tuple[float, ...]
) -> tuple[tuple[float, RatioCurve], ...]:
    """Curves with weights for an operator of these sizes; the rest to 1 is the weight of no correction."""
    if operator in MOVES:
        kin = [curve for curve in curves if curve.operator == operator]
    else:
        kin = [curve for curve in curves if curve.operator not in MOVES]
    exact = [curve for curve in kin if curve.operator == operator and np.allclose(curve.sizes, sizes)]
    if exact:
        return tuple((1.0 / len(exact), curve) for curve in exact)
    distances = [sum((np.log(a) - np.log(b)) ** 2 for a, b in zip(c.sizes, sizes, strict=True)) for c in kin]
    weights = [float(np.exp(-0.5 * distance / NEAR**2)) for distance in distances]
    total = sum(weights) + DOUBT
    return tuple((weight / total, curve) for weight, curve in zip(weights, kin, strict=True) if weight > 1e-3)


# ---------------------------------------------------------------- files

_FOLDER = Path(__file__).parent / "tables"
SCHEMA = 1


def read_tables(path: str | Path) -> Tables:
    """Tables in a file; ConfigError for another format or schema."""
    try:
        document = json.loads(Path(path).read_text())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {document['schema']}; this Libra reads {SCHEMA}: calibrate again")
        return Tables(
            gpu=load_gpu(document["gpu"]),
            efficiencies=Efficiencies(**document["efficiencies"]),
            linear=tuple(RatioCurve(**_fields(curve)) for curve in document["linear"]),
            decode=tuple(RatioRows(**_fields(rows)) for rows in document["decode"]),
            prefill=tuple(RatioRows(**_fields(rows)) for rows in document["prefill"]),
            all_reduce=tuple(AllReduceTable(**_fields(table)) for table in document["all_reduce"]),
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a table of measured ratios ({error}); make one with python -m benchmarks.kernel_tables FILES --save FILE"
        ) from error


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    found = {name: np.array(value) if name.startswith("log_") else value for name, value in values.items()}
    if "rows" in found:
        found["rows"] = tuple((np.array(at), np.array(ratio)) for at, ratio in found["rows"])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


@cache
def shipped_tables(gpu_name: str) -> Tables | None:
    """The package's tables of a GPU, or None."""
    path = _FOLDER / f"{gpu_name.lower().replace('-', '_')}.json"
    return read_tables(path) if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Residuals:
    """Distributions of log(measured / predicted) as evenly spaced ascending quantiles."""

    decode: tuple[float, ...]
    prefill: tuple[float, ...]

    def decode_factor(self, rng: np.random.Generator, num_steps: int = 1) -> float:
        """Factor on ``num_steps`` consecutive decode steps with independent deviations."""
        return _mean_factor(self.decode, rng, num_steps)

    def prefill_factor(self, rng: np.random.Generator) -> float:
        """Factor on the seconds of one prefill."""
        return _mean_factor(self.prefill, rng, 1)


def _mean_factor(quantiles: tuple[float, ...], rng: np.random.Generator, num: int) -> float:
    """Mean of ``num`` factors, from a normal distribution if more than 32."""
    positions = np.linspace(0.0, 1.0, len(quantiles))
    if num <= 32:
        return float(np.exp(np.interp(rng.random(max(num, 1)), positions, quantiles)).mean())
    middle = np.exp(np.interp((np.arange(512) + 0.5) / 512, positions, quantiles))
    return float(middle.mean() + middle.std() / np.sqrt(num) * rng.standard_normal())


@cache
def shipped_residuals() -> Residuals:
    """The package's residuals (A100 and A800, Llama models)."""
    return msgspec.json.decode((_FOLDER / "residuals.json").read_bytes(), type=Residuals)
