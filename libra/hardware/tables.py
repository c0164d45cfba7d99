"""Measurements of one GPU as ratios to the rooflines, interpolated in logarithms.

1. At a measured point a table gives the measurement. Between two points the ratio lies between theirs; beyond the last point the
   nearest ratio holds.
2. Shapes near it correct a matrix product or elementwise operator of a shape that was not measured; without any the
   roofline is used.
3. Attention tables apply only to their own head counts and head length: other kernels differ too much.
4. All-reduce is a table of seconds by number of workers and workers per machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.hardware.gpus import GPU
from libra.hardware.operators import MOVES, activation_bytes, gemm_columns_inner, operator_s
from libra.hardware.profiles import KINDS, AttentionKind, AttentionProfile, CollectiveProfile, LinearProfile, Profile
from libra.hardware.rooflines import Efficiencies
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]

NEAR = 0.25
"""Distance in the logarithm of a size at which another shape's correction has 60 % of its weight."""
DOUBT = 0.1
"""Weight of no correction, against 1 of a shape at distance 0."""


@dataclass(frozen=True, slots=True)
class RatioCurve:
    """Measured over predicted seconds of one operator of one size, by tokens.

    Attributes
    ----------
    operator : str
    sizes : tuple of float
        Columns and inner length of a matrix product; bytes per token of an elementwise operator.
    log_tokens, log_ratio : (n,) arrays
    """

    operator: str
    sizes: tuple[float, ...]
    log_tokens: Array
    log_ratio: Array


@dataclass(frozen=True, slots=True)
class RatioRows:
    """Measured over predicted seconds by two numbers, in rows of unequal length.

    Attributes
    ----------
    key : tuple of float
        Heads, key-value heads and head length, on one GPU.
    log_x : (rows,) array
        Strictly increasing.
    rows : sequence of ((n,) array, (n,) array)
        Second number on a logarithmic scale (`_log_tokens`), log ratio.
    """

    key: tuple[float, ...]
    log_x: Array
    rows: tuple[tuple[Array, Array], ...]

    def log_ratio(self, x: Array, y: Array) -> Array:
        """The log ratio at points: interpolated along the two nearest rows, then between them."""
        log_x, log_y = np.log(x), _log_tokens(y)
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
    """Seconds of an all-reduce by bytes; linear in the logarithms, and beyond its end at the rate reached there."""

    workers: int
    workers_per_node: int
    log_bytes: Array
    log_seconds: Array

    def seconds(self, num_bytes: Array) -> Array:
        """Seconds of ``num_bytes``."""
        log_size = np.log(np.maximum(num_bytes, 1.0))
        beyond = np.maximum(0.0, log_size - self.log_bytes[-1])
        return np.asarray(np.exp(np.interp(log_size, self.log_bytes, self.log_seconds) + beyond))


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one GPU.

    Attributes
    ----------
    gpu : GPU
    efficiencies : Efficiencies
        Constants of the rooflines that the ratios refer to.
    linear : tuple of RatioCurve
    decode, prefill : tuple of RatioRows
    all_reduce : tuple of AllReduceTable
    """

    gpu: GPU
    efficiencies: Efficiencies
    linear: tuple[RatioCurve, ...] = ()
    decode: tuple[RatioRows, ...] = ()
    prefill: tuple[RatioRows, ...] = ()
    all_reduce: tuple[AllReduceTable, ...] = ()

    def of(self, shape: ModelShape) -> ShapeTables:
        """These tables as corrections of one model."""
        return ShapeTables(self, shape)


@dataclass(frozen=True, slots=True)
class ShapeTables:
    """`Tables` as corrections of one model."""

    tables: Tables
    shape: ModelShape
    _found: dict[tuple[str, int], tuple[tuple[float, RatioCurve], ...]] = field(default_factory=dict)

    def ratio(self, operator: str, tp: int, tokens: Array) -> Array:
        """Measured over predicted seconds of an operator."""
        key = (operator, tp)
        if key not in self._found:
            self._found[key] = _near(self.tables.linear, operator, _sizes(operator, self.shape, tp))
        curves = self._found[key]
        log_tokens = np.log(np.maximum(np.asarray(tokens, float), 1.0))
        total = np.zeros_like(log_tokens)
        for weight, curve in curves:
            total = total + weight * np.interp(log_tokens, curve.log_tokens, curve.log_ratio)
        return np.asarray(np.exp(total))

    def decode_ratio(self, num_sequences: Array, mean_context: Array, tp: int) -> Array:
        """Measured over predicted attention of a decode step."""
        return self._attention(self.tables.decode, num_sequences, mean_context, tp)

    def prefill_ratio(self, new_tokens: Array, past_tokens: Array, tp: int) -> Array:
        """Measured over predicted attention of a chunk."""
        return self._attention(self.tables.prefill, new_tokens, past_tokens, tp)

    def all_reduce_s(self, num_bytes: Array, workers: int, workers_per_node: int) -> Array | None:
        """Seconds from the table of this many workers; None without one."""
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
    """Sizes that select an attention kernel: heads, key-value heads and head length, on one of ``tp`` GPUs."""
    return (shape.num_heads / tp, float(shape.kv_heads_per_gpu(tp)), float(shape.head_dim))


def _log_tokens(tokens: Array) -> Array:
    return np.asarray(np.log(np.asarray(tokens, float) + 64.0))


def _sizes(operator: str, shape: ModelShape, tp: int) -> tuple[float, ...]:
    if operator in MOVES:
        return (activation_bytes(operator, shape, tp),)
    return gemm_columns_inner(operator, shape, tp)


def _near(
    curves: Sequence[RatioCurve], operator: str, sizes: tuple[float, ...]
) -> tuple[tuple[float, RatioCurve], ...]:
    """Curves with their weights for an operator of these sizes; the remainder to 1 is the weight of no correction."""
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


def linear_curves(gpu: GPU, eff: Efficiencies, profile: LinearProfile) -> list[RatioCurve]:
    """Ratios of a profile's operators to the rooflines."""
    curves = []
    for curve in profile.curves:
        predicted = operator_s(gpu, eff, profile.shape, curve.tp, curve.operator, curve.tokens)
        sizes = _sizes(curve.operator, profile.shape, curve.tp)
        curves.append(RatioCurve(curve.operator, sizes, np.log(curve.tokens), np.log(curve.seconds / predicted)))
    return curves


def attention_rows(gpu: GPU, eff: Efficiencies, profile: AttentionProfile, kind: AttentionKind) -> RatioRows | None:
    """Ratios of a profile's attention to the roofline, None without points; rows are numbers of sequences, or chunk lengths."""
    points = profile.points(kind)
    if not len(points):
        return None
    log_ratio = np.log(points[:, 2] / profile.form_s(kind, gpu, eff, points))
    firsts = np.unique(points[:, 0])
    rows = []
    for first in firsts:
        here = np.flatnonzero(points[:, 0] == first)
        here = here[np.argsort(points[here, 1])]
        rows.append((_log_tokens(points[here, 1]), log_ratio[here]))
    key = (profile.heads, profile.kv_heads, float(profile.head_dim))
    return RatioRows(key, np.log(firsts), tuple(rows))


def make_tables(gpu: GPU, eff: Efficiencies, profiles: Iterable[Profile]) -> Tables:
    """Tables of profiles of this GPU."""
    every = list(profiles)
    attentions = [p for p in every if isinstance(p, AttentionProfile)]
    decode, prefill = ([attention_rows(gpu, eff, p, kind) for p in attentions] for kind in KINDS)
    return Tables(
        gpu,
        eff,
        tuple(curve for p in every if isinstance(p, LinearProfile) for curve in linear_curves(gpu, eff, p)),
        tuple(rows for rows in decode if rows is not None),
        tuple(rows for rows in prefill if rows is not None),
        tuple(all_reduce_table(p) for p in every if isinstance(p, CollectiveProfile) and p.collective == "all_reduce"),
    )


def all_reduce_table(profile: CollectiveProfile) -> AllReduceTable:
    """The table of a profile."""
    return AllReduceTable(profile.workers, profile.workers_per_node, np.log(profile.num_bytes), np.log(profile.seconds))
