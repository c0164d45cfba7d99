"""Kernel profiles in the layouts of Vidur and Frontier (CSV) and Sailor (JSON), averaged over
repeated points, in seconds.

A file is identified by its columns, never by its name. A CSV has ``time_stats.<operator>.median``
in **milliseconds**. Only the path names the GPU (``compute/a100/...``, ``compute_a100_...``).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.hardware.gpus import GPU, known_gpus
from libra.hardware.layer_seconds import GEMMS, MOVES, Efficiencies, attention_decode_s, attention_prefill_s
from libra.hardware.shapes import ModelShape

Array = NDArray[np.float64]
AttentionKind = Literal["decode", "prefill"]
KINDS: tuple[AttentionKind, ...] = ("decode", "prefill")

_MS = 1e-3
_GPU_WORDS = {
    "a100-40": "A100-40G", "a100-80": "A100-80G", "a100": "A100-80G", "a800": "A800-80G", "h100": "H100-80G",
    "h200": "H200-141G", "h800": "H800-80G", "gh-96": "GH200-96G", "gh200": "GH200-96G", "a40": "A40-48G",
    "l40s": "L40S-48G", "v100-16": "V100-16G", "v100": "V100-16G", "titan-rtx": "TITAN-RTX-24G",
    "rtx-2080": "RTX-2080Ti-11G", "rtx-3090": "RTX-3090-24G", "rtx-4090": "RTX-4090-24G",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """One operator of one shard: seconds (n,) over strictly increasing tokens (n,)."""

    operator: str
    tp: int
    tokens: Array
    seconds: Array


@dataclass(frozen=True, slots=True)
class LinearProfile:
    """Linear and elementwise operators of one model on one GPU."""

    source: str
    gpu: str | None
    shape: ModelShape
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """Attention kernels of one shard on one GPU.

    ``decode`` (n, 3): sequences, tokens of KV of each, seconds for one new token each. ``prefill``
    (n, 3): new tokens, earlier tokens of KV, seconds. ``uneven`` counts dropped rows: sequences of
    different lengths, or mixed phases.
    """

    source: str
    gpu: str | None
    shape: ModelShape
    tp: int
    heads: float
    kv_heads: float
    head_dim: int
    decode: Array
    prefill: Array
    uneven: int

    def points(self, kind: AttentionKind) -> Array:
        """``decode`` or ``prefill``."""
        return self.decode if kind == "decode" else self.prefill

    def form_s(self, kind: AttentionKind, gpu: GPU, eff: Efficiencies, points: Array) -> Array:
        """Seconds of the roofline at the first two columns of ``points``."""
        first, second = points[:, 0], points[:, 1]
        if kind == "decode":
            return attention_decode_s(gpu, eff, first, first * second, 4.0 * self.kv_heads * self.head_dim)
        return attention_prefill_s(gpu, eff, first, second, self.heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class CollectiveProfile:
    """Seconds over bytes of a collective of ``workers`` GPUs, ``workers_per_node`` a machine."""

    source: str
    gpu: str | None
    collective: str
    workers: int
    workers_per_node: int
    num_bytes: Array
    seconds: Array


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """Layers of one model in training on one GPU; seconds are (n, layers)."""

    source: str
    gpu: str | None
    model: str
    points: Array  # (n, 2) sequences of a micro-batch, tensor-parallel degree
    forward_s: Array
    backward_s: Array


Profile = LinearProfile | AttentionProfile | CollectiveProfile | TrainingProfile


def gpu_in_path(path: str | Path) -> str | None:
    """The GPU that a path names: the last word of it that names one; None without such a word."""
    words = str(path).lower().replace("_", "-").replace(" ", "-")
    spots = []
    for word, name in _GPU_WORDS.items():
        matches = re.finditer(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", words)
        spots += [(match.start(), len(word), name) for match in matches]
    for name in known_gpus():
        matches = re.finditer(rf"(?<![a-z0-9]){re.escape(name.lower())}", words)
        spots += [(match.start(), len(name), name) for match in matches]
    return max(spots)[2] if spots else None


def read_profiles(path: str | Path, *, relative_to: str | Path | None = None) -> list[Profile]:
    """The profiles in one file; none if its columns match no known layout.

    Raises
    ------
    ConfigError
        The file is a profile, but a field of it is not a number.
    """
    path = Path(path)
    label = str(path.relative_to(relative_to)) if relative_to is not None else path.name
    if path.suffix == ".json":
        return list(_training(path, label))
    if path.suffix != ".csv":
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = set(rows[0]) if rows else set()
    if {"time_stats.attn_prefill.median", "time_stats.attn_decode.median", "kv_cache_size"} <= names:
        return list(_attention(rows, label))
    if "num_tokens" in names and any(f"time_stats.{op}.median" in names for op in GEMMS):
        return list(_linear(rows, label))
    if {"num_workers", "size", "devices_per_node", "collective"} <= names:
        return list(_collective(rows, label))
    return []


def read_directory(directory: str | Path) -> list[Profile]:
    """The profiles in all CSV and JSON files below ``directory``, by path."""
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(f"{directory}: no such directory; name one that holds profile files")
    files = sorted(path for path in root.rglob("*") if path.suffix in (".csv", ".json") and path.is_file())
    return [profile for path in files for profile in read_profiles(path, relative_to=root)]


def _number(row: dict[str, str], name: str, label: str) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{label}: {name}: got {row.get(name)!r}; expected a number") from error


def _grouped(rows: Sequence[dict[str, str]], *names: str) -> Iterable[list[dict[str, str]]]:
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups.values()


def _averaged(keys: Array, seconds: Array) -> tuple[Array, Array]:
    distinct, where = np.unique(keys, axis=0, return_inverse=True)
    where = where.reshape(-1)
    return distinct, np.bincount(where, weights=seconds) / np.bincount(where)


def _row_shape(row: dict[str, str], label: str, heads_name: str) -> ModelShape:
    heads = int(_number(row, heads_name, label))
    hidden = int(_number(row, "n_embd", label))
    return ModelShape(
        name=label,
        num_layers=1,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(_number(row, "n_kv_head", label)),
        head_dim=hidden // heads,
        ffn=int(float(row.get("n_expanded_embd") or 0)) or 4 * hidden,
        vocab=int(float(row.get("vocab_size") or 0)) or 32000,
    )


def _linear(rows: Sequence[dict[str, str]], label: str) -> Iterator[LinearProfile]:
    for members in _grouped(rows, "n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size"):
        shape = _row_shape(members[0], label, "n_head")
        curves = []
        for operator in GEMMS + MOVES:
            column = f"time_stats.{operator}.median"
            kept = [row for row in members if row.get(column)]
            if not kept:
                continue
            keys = np.array(
                [(_number(r, "num_tensor_parallel_workers", label), _number(r, "num_tokens", label)) for r in kept]
            )
            found, seconds = _averaged(keys, _MS * np.array([_number(r, column, label) for r in kept]))
            for tp in np.unique(found[:, 0]):
                here = (found[:, 0] == tp) & (seconds > 0)
                if here.any():
                    curves.append(Curve(operator, int(tp), found[here, 1], seconds[here]))
        if curves:
            yield LinearProfile(label, gpu_in_path(label), shape, tuple(curves))


def _is_even(row: dict[str, str]) -> bool:
    if row.get("is_true_mixed_batch", "False") == "True" or row.get("is_mixed_batch", "False") == "True":
        return False
    return not float(row.get("seq_len_cv") or 0) > 0


def _attention(rows: Sequence[dict[str, str]], label: str) -> Iterator[AttentionProfile]:
    for members in _grouped(rows, "n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers"):
        shape = _row_shape(members[0], label, "n_q_head")
        tp = int(_number(members[0], "num_tensor_parallel_workers", label))
        even = [row for row in members if _is_even(row)]
        prefill = [r for r in even if r["is_prefill"] == "True" and float(r["batch_size"]) == 1]
        decode = [r for r in even if r["is_prefill"] != "True"]
        yield AttentionProfile(
            source=label,
            gpu=gpu_in_path(label),
            shape=shape,
            tp=tp,
            heads=shape.num_heads / tp,
            kv_heads=float(shape.kv_heads_per_gpu(tp)),
            head_dim=shape.head_dim,
            decode=_points(decode, ("batch_size", "kv_cache_size"), "time_stats.attn_decode.median", label),
            prefill=_points(prefill, ("prefill_chunk_size", "kv_cache_size"), "time_stats.attn_prefill.median", label),
            uneven=len(members) - len(prefill) - len(decode),
        )


def _points(rows: Sequence[dict[str, str]], keys: tuple[str, str], column: str, label: str) -> Array:
    if not rows:
        return np.zeros((0, 3))
    values = np.array([[_number(row, key, label) for key in keys] for row in rows])
    found, seconds = _averaged(values, _MS * np.array([_number(row, column, label) for row in rows]))
    kept = (seconds > 0) & (found[:, 0] > 0)
    return np.column_stack([found[kept], seconds[kept]])


def _collective(rows: Sequence[dict[str, str]], label: str) -> Iterator[CollectiveProfile]:
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for row in rows:
        name = row["collective"]
        column = f"time_stats.{name}.median"
        key = (name, int(_number(row, "num_workers", label)), int(_number(row, "devices_per_node", label)))
        groups.setdefault(key, []).append((_number(row, "size", label), _number(row, column, label)))
    for (name, workers, per_node), pairs in sorted(groups.items()):
        values = np.array(pairs)
        sizes, seconds = _averaged(values[:, :1], _MS * values[:, 1])
        kept = seconds > 0
        yield CollectiveProfile(
            label, gpu_in_path(label), name, workers, per_node, sizes[kept, 0], np.asarray(seconds[kept])
        )


def _training(path: Path, label: str) -> Iterator[TrainingProfile]:
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label}: not JSON: {error}") from error
    if not isinstance(values, dict):
        return
    for model, gpus in values.items():
        for gpu, batches in gpus.items() if isinstance(gpus, dict) else ():
            rows = []
            for batch, degrees in batches.items() if isinstance(batches, dict) else ():
                for tp, layers in degrees.items() if isinstance(degrees, dict) else ():
                    times = _layer_times(layers)
                    if times is None:
                        return
                    rows.append((float(batch), float(tp), times))
            if rows:
                rows.sort(key=lambda row: row[:2])
                times = np.stack([row[2] for row in rows])
                points = np.array([row[:2] for row in rows])
                yield TrainingProfile(label, gpu_in_path(gpu), f"{model}", points, times[..., 0], times[..., 1])


def _layer_times(layers: object) -> Array | None:
    if not isinstance(layers, dict) or not layers:
        return None
    try:
        times = np.array([layers[key] for key in sorted(layers, key=int)], float)
    except (TypeError, ValueError):
        return None
    return times if times.ndim == 2 and times.shape[1] == 3 else None
