"""Balanced partition of sequences over minibatches or replicas.

Invariants
----------
1. Every item is in exactly one part.
2. No part is empty (there are never more parts than items).
3. With ``equal_size`` all parts have the same number of items.
4. The heaviest part outweighs the lightest by no more than the heaviest item; `karmarkar_karp` with ``equal_size``, by no
   more than the heaviest item outweighs the lightest.
5. `partition_groups` never cuts a group.
6. Deterministic: the same weights in the same order give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from libra.errors import TrainError

_Part = tuple[int, int, tuple[int, ...]]  # (sum, number of items, items): compared in that order
_Group = TypeVar("_Group", bound=Hashable)


def karmarkar_karp(weights: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``weights`` in ``num_parts`` parts of nearly equal sum, by the largest differencing method.

    Karmarkar & Karp (1982), k-way: partial partitions wait in a heap by their spread, and the two widest are
    merged, the heaviest part of one with the lightest of the other. With ``equal_size`` the first partial partitions
    hold one item per part instead of one item in all. Sums agree with ``get_seqlen_balanced_partitions`` of verl 0.9.1.

    Raises
    ------
    TrainError
        If ``num_parts`` is below 1 or above the number of weights, or does not divide it with ``equal_size``.
    """
    _check(len(weights), num_parts, equal_size)
    # Each entry: (-spread, order key, parts from heaviest to lightest). The order key breaks ties by the heaviest part.
    heap: list[tuple[int, tuple[int, int, tuple[int, ...]], list[_Part]]] = []
    lightest_first: list[_Part] = sorted((int(weight), 1, (index,)) for index, weight in enumerate(weights))
    step = num_parts if equal_size else 1
    for start in range(0, len(lightest_first), step):
        parts = lightest_first[start : start + step][::-1]
        heapq.heappush(heap, _entry(parts + [(0, 0, ())] * (num_parts - step)))
    while len(heap) > 1:
        widest, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1], heavy[2] + light[2])
            for heavy, light in zip(widest, reversed(other), strict=True)
        ]
        heapq.heappush(heap, _entry(sorted(merged, reverse=True)))
    return _without_empty([list(items) for _, _, items in heap[0][2]], weights)


def greedy_partition(weights: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``weights`` in ``num_parts`` parts: each in turn goes to the lightest part so far.

    With ``equal_size`` only parts with the fewest items are open. Sums agree with ``greedy_partition`` of verl 0.9.1. Raises as
    `karmarkar_karp`.
    """
    _check(len(weights), num_parts, equal_size)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # (items where they must be equal, sum, number of the part): the heap's smallest entry is the part that is next.
    heap = [(0, 0, number) for number in range(num_parts)]
    for index, weight in enumerate(weights):
        count, total, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (count + equal_size, total + int(weight), number))
    return _without_empty(parts, weights)


def partition_groups(
    weights: Sequence[int],
    groups: Sequence[_Group],
    num_parts: int,
    *,
    equal_size: bool = False,
    method: Callable[..., list[list[int]]] = karmarkar_karp,
) -> list[list[int]]:
    """Indices of ``weights`` in parts that keep groups whole, so that siblings are trained on one rank.

    ``method`` (`karmarkar_karp` or `greedy_partition`) is applied to the sums of the groups; ``equal_size`` and errors count
    groups. ``groups`` has one entry per weight; members need not be neighbours.
    """
    members = members_by_group(groups, len(weights))
    sums = [sum(int(weights[index]) for index in group) for group in members]
    parts = method(sums, num_parts, equal_size=equal_size)
    return [sorted(index for group in part for index in members[group]) for part in parts]


def members_by_group(groups: Sequence[_Group], num_items: int) -> list[list[int]]:
    """Indices of the items of each group, groups in order of their first item."""
    if len(groups) != num_items:
        raise TrainError(f"groups: got {len(groups)} group ids for {num_items} sequences; give one for each")
    members: dict[_Group, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _check(num_items: int, num_parts: int, equal_size: bool) -> None:
    if not 1 <= num_parts <= num_items:
        raise TrainError(
            f"balanced partition: got {num_parts} parts of {num_items} sequences; "
            f"allowed are 1 to {num_items}, so that no part is empty"
        )
    if equal_size and num_items % num_parts:
        raise TrainError(
            f"balanced partition: {num_items} sequences do not make {num_parts} parts of equal size; "
            f"give a multiple of {num_parts}, or equal_size=False"
        )


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
