"""The memory of an engine over time is largest where a walk over all steps finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.policy.kv_profile import Demand, peak_tokens


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 100), st.integers(0, 200)), min_size=1, max_size=8),
)
def test_the_peak_is_that_of_a_walk_over_all_steps(rows: list[tuple[int, int, int]]) -> None:
    demands = [Demand(left, context, context + growth) for left, context, growth in rows]
    walked = max(
        sum(d.context + (d.final - d.context) * step / d.left for d in demands if step <= d.left) for step in range(31)
    )
    assert peak_tokens(demands) == pytest.approx(walked)


def test_one_that_never_ends_is_held_beside_all_others() -> None:
    assert peak_tokens([Demand(1e12, 70.0, 70.0), Demand(10.0, 20.0, 40.0)]) == pytest.approx(110.0)
    assert peak_tokens([]) == 0.0
