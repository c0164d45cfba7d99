"""A compact set of ids answers as a plain one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libra.store.trajectory_store import StoredIds
from libra.types import TrajectoryId

IDS = st.builds(
    TrajectoryId, st.integers(0, 3) | st.just(10**6), st.integers(0, 2) | st.just(2**31 - 1),
    st.integers(0, 2) | st.just(2**31 - 1), st.sampled_from(["train", "eval"]),
)  # fmt: skip


@given(st.sets(IDS), st.lists(st.sets(IDS), max_size=3), st.lists(IDS))
def test_it_has_what_was_added_and_nothing_else(first, later, asked):
    ids, known = StoredIds(), set(first)
    rows = sorted(first)
    ids.add_columns(
        np.array([i.split for i in rows], np.dtypes.StringDType()),
        *(np.array([i[n] for i in rows], np.int32) for n in range(3)),
    )
    for new in later:
        ids.add(new - known)
        known |= new
    assert sorted(ids.among(asked)) == sorted(i for i in asked if i in known)
    assert all((i in ids) == (i in known) for i in asked)
