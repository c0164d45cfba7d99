"""The columns of matrices in which two versions differ, read from their files without loading either.

Invariants
1. A matrix of which any bit differs yields at least one changed column (a changed row for an embedding).
2. Reading stops at the first block of rows that differs, so versions a step apart cost a small part of their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from libra.errors import WeightsError
from libra.projections import is_embedding
from libra.weights.version_check import ExpectedProbes

FIRST_ELEMENTS, BLOCK_ELEMENTS = 2**12, 2**18
"""Elements compared first, in most versions enough, and at most at once."""
COLUMNS = 2
"""Number of changed columns requested of a matrix, and of random ones."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_columns(before: Tensor, after: Tensor, *, rows: bool = False) -> list[int]:
    """Columns (``rows``: rows) in which some element differs, from the first block that has any; empty if all is equal."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return list(range(min(after.shape[0 if rows else 1], 64)))
    bits = _BITS[after.element_size()]
    begin, size = 0, FIRST_ELEMENTS
    while begin < after.shape[0]:
        end = begin + max(1, size // after.shape[1])
        differs = (before[begin:end].view(bits) != after[begin:end].view(bits)).any(1 if rows else 0)
        if bool(differs.any()):
            return (torch.nonzero(differs)[:, 0] + (begin if rows else 0)).tolist()
        begin, size = end, min(4 * size, BLOCK_ELEMENTS)
    return []


def expected_columns(
    path: Path, before: list[Path], tied: Mapping[str, str], dtype: torch.dtype, seed: int
) -> tuple[dict[str, tuple[int, ...]], ExpectedProbes]:
    """What to request from an engine that loads ``path`` and held one of ``before``, and the right answer, bit for bit.

    ``tied`` maps further names to those in the file. Every norm and bias is requested whole; of a matrix up to `COLUMNS`
    places that differ from each of ``before`` and as many random ones. A file of ``before`` that was removed is skipped.

    Raises
    ------
    WeightsError
        ``path`` is not readable.
    """
    rng = np.random.default_rng(seed)
    wanted: dict[str, tuple[int, ...]] = {}
    columns: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    num_changed = 0
    try:
        with safe_open(path, framework="pt") as file:
            older = [held for held in map(_opened, before) if held is not None]
            names = {name: name for name in file.keys()} | dict(tied)  # noqa: SIM118  a safe_open has no __iter__
            for name, stored in names.items():
                tensor = file.get_tensor(stored)
                if tensor.ndim == 1:
                    wanted[name], columns[name] = (), tensor.to(dtype).float().numpy()[None]
                elif tensor.ndim == 2 and name.endswith(".weight"):
                    rows = is_embedding(name)
                    places = [int(place) for place in rng.integers(0, tensor.shape[0 if rows else 1], COLUMNS)]
                    changed = False
                    for held in older:
                        differing = changed_columns(held.get_tensor(stored), tensor, rows=rows)
                        changed |= bool(differing)
                        places += rng.permutation(differing)[:COLUMNS].tolist() if differing else []
                    num_changed += changed
                    wanted[name] = tuple(places)
                    columns[name] = (tensor[places] if rows else tensor[:, places].T).to(dtype).float().numpy()
    except (OSError, SafetensorError) as fault:
        raise WeightsError(f"weights: {path} is torn or not readable ({fault})") from fault
    return wanted, ExpectedProbes(columns, num_changed if older else None)


def _opened(path: Path) -> Any:
    """An open safetensors file, None if there is none; safetensors has no types."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError):
        return None
