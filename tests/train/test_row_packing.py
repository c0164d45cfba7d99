from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import fill_rows, fill_rows_by_group, fill_rows_mffd

METHODS = (fill_rows, fill_rows_mffd)


@pytest.mark.parametrize("method", METHODS)
@given(lengths=st.lists(st.integers(1, 80), max_size=60), room=st.integers(1, 100))
def test_rows_hold_every_sequence_once_within_their_room(method, lengths, room):
    rows = method(lengths, room)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= room or len(row) == 1 for row, total in zip(rows, sums, strict=True))
    assert sums == sorted(sums, reverse=True)
    if method is fill_rows:  # no two rows could have been one
        assert all(a + b > room for i, a in enumerate(sums) for b in sums[i + 1 :])


def test_modified_first_fit_needs_fewer_rows_where_first_fit_wastes_the_room_beside_long_ones():
    # Johnson's bad case of first-fit decreasing: nine full rows, of which it makes eleven (the modified one ten).
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert sum(lengths) == 9 * 100
    assert (len(fill_rows(lengths, 100)), len(fill_rows_mffd(lengths, 100))) == (11, 10)


@pytest.mark.parametrize("method", METHODS)
@given(given=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=40), room=st.integers(1, 400))
def test_groups_stay_whole_or_are_refused(method, given, room):
    lengths, groups = [length for length, _ in given], [group for _, group in given]
    totals = {g: sum(length for length, other in given if other == g) for g in groups}
    if totals and max(totals.values()) > room:
        with pytest.raises(TrainError):
            fill_rows_by_group(lengths, groups, room, method)
        return
    sets = fill_rows_by_group(lengths, groups, room, method)
    assert sorted(index for one in sets for index in one) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in one) <= room for one in sets)
    assert sum(len({groups[index] for index in one}) for one in sets) == len(totals)
