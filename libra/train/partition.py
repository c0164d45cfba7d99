"""Balanced partition of sequences over minibatches or replicas.

Invariants
----------
1. Every item is in exactly one part.
2. No part is empty (there are never more parts than items).
3. Deterministic: the same weights in the same order give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from libra.errors import TrainError

_Part = tuple[int, int, tuple[int, ...]]  # (sum, number of items, items): compared in that order


def karmarkar_karp(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``num_parts`` parts of nearly equal sum, by the largest differencing method.

    Karmarkar & Karp (1982), k-way: partial partitions wait in a heap by their spread, and the two widest are
    merged, the heaviest part of one with the lightest of the other.

    Raises
    ------
    TrainError
        Where ``num_parts`` is below 1 or above the number of weights.
    """
    if not 1 <= num_parts <= len(weights):
        raise TrainError(
            f"balanced partition: {num_parts} parts of {len(weights)} sequences asked; "
            f"allowed are 1 to {len(weights)}, so that no part is empty"
        )
    # Each entry: (-spread, order key, parts from heaviest to lightest). The order key breaks ties by the heaviest part.
    heap: list[tuple[int, tuple[int, int, tuple[int, ...]], list[_Part]]] = []
    for weight, index in sorted((int(weight), index) for index, weight in enumerate(weights)):
        heapq.heappush(heap, _entry([(weight, 1, (index,))] + [(0, 0, ())] * (num_parts - 1)))
    while len(heap) > 1:
        widest, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1], heavy[2] + light[2])
            for heavy, light in zip(widest, reversed(other), strict=True)
        ]
        heapq.heappush(heap, _entry(sorted(merged, reverse=True)))
    return _without_empty([list(items) for _, _, items in heap[0][2]], weights)


def _entry(parts: list[_Part]) -> tuple[int, _Part, list[_Part]]:
    total, count, items = parts[0]
    return parts[-1][0] - total, (-total, -count, tuple(-item for item in items)), parts


def _without_empty(parts: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    """Give an empty part (possible only where weights are 0 or parts many) the lightest item of the longest part."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            part.append(donor.pop(donor.index(min(donor, key=lambda index: weights[index]))))
    return [sorted(part) for part in parts]
