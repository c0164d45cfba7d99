"""Bin packing of sequences into rows (or micro-batches) by length.

Invariants
----------
1. Every sequence is in exactly one row.
2. A row holds at most ``max_row_tokens``; a sequence longer than that has a row of its own.
3. `fill_rows` uses at most 11/9 OPT + 6/9 rows (Dosa 2007), `fill_rows_mffd` at most 71/60 OPT + 1 (Yue & Zhang 1995).
4. `fill_rows_by_group` keeps the members of a group in one row.
5. Rows are in order of falling length; deterministic in the order of ``lengths``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence

from libra.errors import TrainError
from libra.train.balanced_partition import members_by_group

FillRows = Callable[[Sequence[int], int], list[list[int]]]


def fill_rows(lengths: Sequence[int], max_row_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` in rows of at most ``max_row_tokens``, first-fit decreasing; longest row first."""
    rows: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row in range(len(rows)) if used[row] + lengths[index] <= max_row_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(index)
        used[row] += lengths[index]
    return _longest_first(rows, lengths)


def fill_rows_mffd(lengths: Sequence[int], max_row_tokens: int) -> list[list[int]]:
    """Rows by modified first-fit decreasing (Johnson & Garey, "A 71/60 theorem for bin packing", 1985).

    Sequences above half a row have rows of their own. Their free room goes, from the fullest row on, to sequences above a
    third; then, from the emptiest row on and in rows without one of those, to pairs of between a sixth and a third, the
    shortest with the longest that fits beside it; then to any sequence that fits, longest first. The rest is packed
    first-fit decreasing.
    """
    room, rows = max_row_tokens, []
    rest: list[tuple[int, int]] = []  # (length, -index), shortest first: the last that fits is the first of the longest
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if 2 * lengths[index] > room:
            rows.append([index])
        else:
            rest.append((lengths[index], -index))
    rest.reverse()
    left = [room - lengths[row[0]] for row in rows]

    def put(row: int, at: int) -> None:
        length, negative = rest.pop(at)
        rows[row].append(-negative)
        left[row] -= length

    for row in range(len(rows)):
        at = _longest_within(rest, left[row])
        if at >= 0 and 3 * rest[at][0] > room:
            put(row, at)
    for row in reversed(range(len(rows))):
        first, end = bisect_right(rest, (room // 6, 1)), bisect_right(rest, (room // 3, 1))
        if len(rows[row]) > 1 or end - first < 2 or rest[first][0] + rest[first + 1][0] > left[row]:
            continue
        put(row, first)
        put(row, min(_longest_within(rest, left[row]), end - 2))
    for row in range(len(rows)):
        while (at := _longest_within(rest, left[row])) >= 0:
            put(row, at)
    kept = sorted(-negative for _, negative in rest)
    rows += [[kept[index] for index in row] for row in fill_rows([lengths[index] for index in kept], room)]
    return _longest_first(rows, lengths)


def fill_rows_by_group(
    lengths: Sequence[int], groups: Sequence[Hashable], max_tokens: int, method: FillRows = fill_rows
) -> list[list[int]]:
    """Indices of ``lengths`` in sets of at most ``max_tokens`` that keep groups whole, so that siblings share a micro-batch.

    ``method`` (`fill_rows` or `fill_rows_mffd`) is applied to the sums of the groups. TrainError if a group exceeds
    ``max_tokens``.
    """
    members = members_by_group(groups, len(lengths))
    sums = [sum(lengths[index] for index in group) for group in members]
    if sums and max(sums) > max_tokens:
        raise TrainError(
            f"packing by group: group {groups[members[sums.index(max(sums))][0]]!r} has {max(sums)} tokens and cannot be "
            f"cut; give {max(sums)} tokens or more, or pack without groups"
        )
    return [[index for group in part for index in members[group]] for part in method(sums, max_tokens)]


def _longest_within(rest: list[tuple[int, int]], room: int) -> int:
    """Position of the longest entry of at most ``room``, -1 if there is none. Indices are >= 0, so never 1 negated."""
    return bisect_left(rest, (room, 1)) - 1


def _longest_first(rows: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    used = [sum(lengths[index] for index in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (-used[row], row))
    return [rows[row] for row in order]
