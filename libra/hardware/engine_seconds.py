"""Seconds of an inference engine's steps: one model on ``tp`` equal GPUs.

1. More sequences at equal mean context, or more context, never shorten a step, and more tokens in
   or before a prefill never shorten the prefill: falling measurements are pooled. Each operator is
   sharded over ``tp`` once.
2. A decode step is layers x (linear + attention + two all-reduces) + output matrix + host overhead.
3. ``kv_capacity_tokens`` is counted per GPU; key-value heads are replicated if tp exceeds their
   number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware.gpus import GPU, load_gpu
from libra.hardware.layer_seconds import (
    Efficiencies,
    all_reduce_s,
    attention_decode_s,
    attention_prefill_s,
    layer_s,
    operator_s,
)
from libra.hardware.shapes import ModelShape, load_shape
from libra.hardware.tables import ShapeTables, Tables, shipped_tables
from libra.types import StepSeconds

Array = NDArray[np.float64]


class Grid:
    """Values (x, y) on a grid: bilinear, linear beyond far edges, constant before near ones.

    Interpolation is monotone if the grid is. scipy's ``RegularGridInterpolator`` is far slower for
    single points, of which a simulation reads millions.
    """

    def __init__(self, xs: ArrayLike, ys: ArrayLike, values: ArrayLike) -> None:
        self._x, self._y = np.asarray(xs, float), np.asarray(ys, float)
        self._v = np.asarray(values, float)
        self._xs: list[float] = self._x.tolist()
        self._ys: list[float] = self._y.tolist()
        self._rows: list[list[float]] = self._v.tolist()

    def at(self, x: float, y: float) -> float:
        """The value at one point."""
        xs, ys = self._xs, self._ys
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        j = min(max(bisect_right(ys, y) - 1, 0), len(ys) - 2)
        u = max(0.0, (x - xs[i]) / (xs[i + 1] - xs[i]))
        w = max(0.0, (y - ys[j]) / (ys[j + 1] - ys[j]))
        low, high = self._rows[i], self._rows[i + 1]
        left = low[j] + w * (low[j + 1] - low[j])
        right = high[j] + w * (high[j + 1] - high[j])
        return left + u * (right - left)

    def at_many(self, x: ArrayLike, y: ArrayLike) -> Array:
        """The values at many points; ``x`` and ``y`` broadcast."""
        x, y = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
        i = np.clip(np.searchsorted(self._x, x, side="right") - 1, 0, len(self._x) - 2)
        j = np.clip(np.searchsorted(self._y, y, side="right") - 1, 0, len(self._y) - 2)
        u = np.maximum(0.0, (x - self._x[i]) / (self._x[i + 1] - self._x[i]))
        w = np.maximum(0.0, (y - self._y[j]) / (self._y[j + 1] - self._y[j]))
        v = self._v
        left = v[i, j] + w * (v[i, j + 1] - v[i, j])
        right = v[i + 1, j] + w * (v[i + 1, j + 1] - v[i + 1, j])
        return np.asarray(left + u * (right - left))


_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CONTEXTS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_PASTS = (0, 256, 1024, 4096, 16384, 65536, 262144)


MEMORY_FRAC, RESERVED_BYTES = 0.9, 2.0e9
"""Share of GPU memory for an engine, and bytes reserved for activations and runtime."""
CHUNK_TOKENS = 8192
"""Longer prefills are computed in chunks of this many tokens."""


class Overhead(NamedTuple):
    """Host seconds per step beyond the kernels, and per GPU beyond the first.

    Covers scheduling, sampling, detokenisation and graph launches. The default is assumed; `libra
    calibrate` measures it.
    """

    step_s: float = 2.0e-3
    worker_s: float = 0.1e-3


class EngineSeconds(Protocol):
    """Seconds and KV memory of one model on one engine, for planner, simulator and emulated engines."""

    @property
    def tp(self) -> int:
        """GPUs of the engine (tensor-parallel degree)."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Seconds of a step of ``num_sequences`` tokens; ``context_tokens`` is the total context."""

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds to compute ``new_tokens`` of one sequence after ``past_tokens`` in the KV cache."""

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps; the arguments broadcast."""

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences in turn; the arguments broadcast."""


@dataclass(frozen=True)
class ModelOnGPU:
    """`EngineSeconds` from rooflines, corrected by the GPU's tables ``measured``."""

    gpu: GPU
    shape: ModelShape
    tp: int
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    measured: ShapeTables | None = None
    overhead: Overhead = field(default_factory=Overhead)

    def __post_init__(self) -> None:
        self.shape.check_tp(self.tp)
        if self.free_bytes <= 0:
            allowed = MEMORY_FRAC * self.gpu.memory_bytes
            need = self.shape.weight_bytes(1) / (allowed - RESERVED_BYTES)
            raise ConfigError(
                f"{self.shape.name} on {self.gpu.name} with tp={self.tp}: weights take "
                f"{self.shape.weight_bytes(self.tp) / 1e9:.1f} GB of a GPU, {allowed / 1e9:.1f} GB are allowed, "
                f"{RESERVED_BYTES / 1e9:.1f} GB of them reserved; choose tp above {need:.1f}"
            )

    @property
    def free_bytes(self) -> float:
        """Bytes per GPU for KV; negative if the weights do not fit."""
        return MEMORY_FRAC * self.gpu.memory_bytes - self.shape.weight_bytes(self.tp) - RESERVED_BYTES

    @cached_property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        return int(self.free_bytes // self.shape.kv_bytes_per_token(self.tp))

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes per token over all GPUs of the engine."""
        return int(self.shape.kv_bytes_per_token(self.tp)) * self.tp

    @cached_property
    def host_s(self) -> float:
        """Host overhead of each step."""
        return self.overhead.step_s + self.overhead.worker_s * (self.tp - 1)

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """See `EngineSeconds`."""
        if num_sequences < 1:
            return 0.0
        attention = self._decode.at(num_sequences, context_tokens / num_sequences)
        return self._linear.at(num_sequences, 0.0) + attention + self.host_s

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps; the arguments broadcast."""
        num = np.asarray(num_sequences, float)
        mean = np.asarray(context_tokens, float) / np.maximum(num, 1.0)
        seconds = self._linear.at_many(num, 0.0) + self._decode.at_many(num, mean) + self.host_s
        return np.where(num >= 1, seconds, 0.0)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds to compute ``new_tokens`` of one sequence after ``past_tokens`` in the KV cache."""
        seconds = 0.0
        for done in range(0, new_tokens, CHUNK_TOKENS):
            chunk = min(new_tokens - done, CHUNK_TOKENS)
            seconds += self._linear.at(chunk, 1.0) + self._prefill.at(chunk, past_tokens + done) + self.host_s
        return seconds

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences in turn; the arguments broadcast."""
        new, past = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(past_tokens, float))
        seconds, done = np.zeros(new.shape), np.zeros(new.shape)
        while np.any(done < new):
            chunk = np.minimum(new - done, CHUNK_TOKENS)
            one = self._linear.at_many(chunk, 1.0) + self._prefill.at_many(chunk, past + done) + self.host_s
            seconds += np.where(chunk > 0, one, 0.0)
            done = done + chunk
        return seconds

    def layer_s(self, tokens: ArrayLike) -> Array:
        """Seconds of one layer's linear and elementwise operators for ``tokens`` tokens."""
        return layer_s(self.gpu, self.efficiencies, self.shape, self.tp, tokens, self.measured)

    @cached_property
    def _linear(self) -> Grid:
        """Step seconds without attention and host, by tokens; column 1: prefill (one logit row)."""
        from scipy.optimize import isotonic_regression  # takes most of a second to import

        top = max(CHUNK_TOKENS, 2048)
        tokens = np.unique(np.r_[1:129, 128:2048:64, 2048 : top + 512 : 512]).astype(float)
        size, per_node = tokens * self.shape.hidden * self.shape.bytes_per_weight, min(self.tp, self.gpu.gpus_per_node)
        reduce_s = None if self.measured is None else self.measured.all_reduce_s(size, self.tp, per_node)
        if reduce_s is None:
            reduce_s = all_reduce_s(self.gpu, self.efficiencies, size, self.tp, per_node)
        per_layer = self.layer_s(tokens) + 2.0 * reduce_s
        one = operator_s(self.gpu, self.efficiencies, self.shape, self.tp, "emb", tokens, self.measured)
        head = operator_s(self.gpu, self.efficiencies, self.shape, self.tp, "lm_head", np.r_[tokens, 1.0])
        body = self.shape.num_layers * per_layer + one
        decode, prefill = (isotonic_regression(body + logits).x for logits in (head[:-1], head[-1]))
        return Grid(tokens, [0.0, 1.0], np.stack([decode, prefill], axis=1))

    @cached_property
    def _decode(self) -> Grid:
        num, mean = np.meshgrid(np.asarray(_BATCHES, float), np.asarray(_CONTEXTS, float), indexing="ij")
        kv_bytes = self.shape.kv_bytes_per_token(self.tp) / self.shape.num_layers
        seconds = attention_decode_s(self.gpu, self.efficiencies, num, num * mean, kv_bytes)
        if self.measured is not None:
            seconds = seconds * self.measured.decode_ratio(num, mean, self.tp)
        return Grid(_BATCHES, _CONTEXTS, self.shape.num_layers * _rising_both(seconds))

    @cached_property
    def _prefill(self) -> Grid:
        news = np.unique(np.r_[1, 16, 32, 64, 96, np.arange(128, CHUNK_TOKENS + 128, 128)]).astype(float)
        new, past = np.meshgrid(news, np.asarray(_PASTS, float), indexing="ij")
        heads, dim = self.shape.num_heads / self.tp, self.shape.head_dim
        seconds = attention_prefill_s(self.gpu, self.efficiencies, new, past, heads, dim)
        if self.measured is not None:
            seconds = seconds * self.measured.prefill_ratio(new, past, self.tp)
        return Grid(news, _PASTS, self.shape.num_layers * _rising_both(seconds))


def _rising_both(values: Array) -> Array:
    """Running maximum along both axes: attention falls by a few percent where kernels change."""
    return np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)


def engine_seconds(
    gpu: str | GPU,
    model: str | Path | Mapping[str, Any] | ModelShape,
    tp: int = 1,
    *,
    tables: Tables | Literal["shipped"] | None = "shipped",
    **settings: Any,
) -> ModelOnGPU:
    """Seconds of ``model`` on ``tp`` GPUs: a name such as "A800-80G", or a datasheet's path.

    ``model`` is a directory with ``config.json``, that file, its fields, or a known name
    ("Qwen/Qwen3-14B"). ``tables`` are from `libra calibrate`, by default the package's; None for
    rooflines only. ``settings`` are fields of `ModelOnGPU`. ConfigError for an unknown GPU, heads
    that ``tp`` does not divide, or weights that do not fit; ModelError for an unknown or non-dense
    model.

    >>> engine = engine_seconds("A800-80G", "Qwen3-14B", tp=2)
    >>> engine.decode_step_s(32, 32 * 4096) > engine.decode_step_s(1, 4096)
    True
    """
    sheet = gpu if isinstance(gpu, GPU) else load_gpu(gpu)
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    if tables == "shipped":
        tables = shipped_tables(sheet.name)
    if tables is not None:
        settings = {"efficiencies": tables.efficiencies, "measured": tables.of(shape), **settings}
    return ModelOnGPU(sheet, shape, tp, **settings)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """`EngineSeconds` of an engine that declared ``steps``; prefill is equal in any batch.

    ``wall_over_passes``: wall seconds of its turns over the sum of its passes, to include work
    between passes.
    """

    steps: StepSeconds
    tp: int
    kv_capacity_tokens: int
    wall_over_passes: float = 1.0

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Seconds of one step; ``context_tokens`` is the total of all sequences."""
        if num_sequences < 1:
            return 0.0
        return self.wall_over_passes * self.steps.step_s(num_sequences, context_tokens)

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps; the arguments broadcast."""
        num, context = np.broadcast_arrays(np.asarray(num_sequences, float), np.asarray(context_tokens, float))
        steps = self.steps
        seconds = steps.fixed_s + steps.sequence_s * num + steps.context_token_s * context
        return np.where(num >= 1, self.wall_over_passes * seconds, 0.0)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds that ``new_tokens`` add to a pass."""
        return self.wall_over_passes * self.steps.prefill_token_s * max(0, new_tokens)

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences."""
        new, _ = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(past_tokens, float))
        return np.asarray(self.wall_over_passes * self.steps.prefill_token_s * np.maximum(new, 0.0))
