"""Micro-batches whose tokens are spread over the experts: which samples go together, by the routes that the engine recorded.

A micro-batch takes as long as its busiest expert (and on expert-parallel devices the busiest one holds up the others), so what
counts is max / mean load of a layer's experts, per micro-batch. Samples of one prompt use similar experts and have similar lengths,
and packing by length puts them together; here each goes where it makes the loads more even.

Invariants
1. Every item is in exactly one part; no part is empty.
2. Which samples share a micro-batch changes no gradient but for the rounding of sums.
3. Deterministic: the same items in the same order give the same parts.

Shape legend: S items, D loads of an item (one per layer and expert), M parts, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_SWEEPS = 8
"""Passes over all items that try to move or exchange one."""
NUM_PARTNERS = 64
"""About how many items are tried as the partner of one, evenly over all."""


def loads_of(routes: Sequence[NDArray[np.int16]], num_experts: int) -> NDArray[np.float64]:
    """Tokens that each item sends to each expert of each layer (S, L x E); an item is its routes (T, L, K), -1: not recorded."""
    rows = []
    for each in routes:
        layers = each.shape[1]
        flat = (each.astype(np.int64) + np.arange(layers)[None, :, None] * num_experts)[each >= 0]
        rows.append(np.bincount(flat, minlength=layers * num_experts).astype(np.float64))
    return np.stack(rows)


def load_ratio(loads_SD: NDArray[np.float64], num_experts: int) -> float:
    """Mean over layers of the busiest expert's tokens over the mean of all experts, of items that run together; 1 without any."""
    by_layer = loads_SD.sum(0).reshape(-1, num_experts)
    by_layer = by_layer[by_layer.sum(1) > 0]
    return float((by_layer.max(1) / by_layer.mean(1)).mean()) if len(by_layer) else 1.0


def balanced_parts(loads_SD: NDArray[np.float64], sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of items in ``num_parts`` parts of nearly equal size and of even loads.

    Items go, the largest first, where they raise the cost least; then one after the other is moved, or exchanged with one of
    another part, while that lowers it. The cost is the sum of squares of each part's loads and of its size, each load relative
    to the mean over parts: least where every part has the same share of everything.
    """
    values = np.concatenate([loads_SD, np.asarray(sizes, np.float64)[:, None]], 1)
    mean_D = np.maximum(values.sum(0) / num_parts, 1e-12)
    values = values / mean_D
    values[:, -1] *= np.sqrt(loads_SD.shape[1])  # size weighs as much as all loads together
    sums_MD, part_of = np.zeros((num_parts, values.shape[1])), np.zeros(len(values), np.int64)
    order = sorted(range(len(values)), key=lambda index: (-sizes[index], index))
    for place, index in enumerate(order):
        if place < num_parts:  # so that no part is empty
            part = place
        else:
            part = int(np.argmin(sums_MD @ values[index]))  # 2 s.v + v.v is what the square sum grows by
        part_of[index] = part
        sums_MD[part] += values[index]
    for _ in range(MAX_SWEEPS):
        if not sum(_improved(index, values, sums_MD, part_of) for index in order):
            break
    return [[int(index) for index in np.flatnonzero(part_of == part)] for part in range(num_parts)]


def _improved(
    index: int, values: NDArray[np.float64], sums_MD: NDArray[np.float64], part_of: NDArray[np.int64]
) -> bool:
    """Move an item, or exchange it with one of another part, where that lowers the cost most; whether it did."""
    home, own = int(part_of[index]), values[index]
    others = np.flatnonzero(part_of != home)
    others = others[:: max(1, len(others) // NUM_PARTNERS)]
    # Exchange with j of part q: d = v_i - v_j leaves home for q; the cost changes by 2 d.(s_q - s_home + d).
    given = own - values[others]
    change = ((sums_MD[part_of[others]] - sums_MD[home] + given) * given).sum(1)
    best = float(change.min()) if len(change) else 0.0
    partner: int | None = int(others[int(change.argmin())]) if len(change) else None
    target = home
    if (part_of == home).sum() > 1:
        moves = ((sums_MD - sums_MD[home] + own) * own).sum(1)
        moves[home] = 0.0
        if float(moves.min()) < best:
            best, partner, target = float(moves.min()), None, int(moves.argmin())
    if best >= -1e-9:
        return False
    if partner is not None:
        target = int(part_of[partner])
        part_of[partner] = home
        sums_MD[home] += values[partner]
        sums_MD[target] -= values[partner]
    part_of[index] = target
    sums_MD[home] -= own
    sums_MD[target] += own
    return True
