"""Engines that fit in number fit into whole nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PlanError
from libra.planner.node_placement import placed


@given(
    st.integers(1, 60),
    st.sampled_from([4, 8, 16]),
    st.integers(0, 60),
    st.lists(st.sampled_from([1, 2, 4, 8]), max_size=30),
)
def test_whatever_fits_in_number_finds_its_nodes(num_gpus: int, node: int, train: int, degrees: list[int]) -> None:
    train = min(train, num_gpus)
    left, engines = num_gpus - train, dict[int, int]()
    for tp in degrees:
        if tp <= min(left, node):
            engines[tp] = engines.get(tp, 0) + 1
            left -= tp
    groups = placed(num_gpus, node, train, engines)
    assert sum(group.num_nodes * group.train_gpus for group in groups) == train
    for tp, number in engines.items():
        assert sum(group.num_nodes * group.engines.get(tp, 0) for group in groups) == number
    for group in groups:
        used = group.train_gpus + sum(tp * number for tp, number in group.engines.items()) + group.free_gpus
        assert used in (node, num_gpus % node)


def test_too_much_is_refused() -> None:
    with pytest.raises(PlanError, match=r"type planner\.num_gpus=18"):
        placed(16, 8, 2, {8: 2})
