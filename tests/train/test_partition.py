from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import karmarkar_karp


def test_sums_are_verls(repository):
    cases = json.loads((repository / "tests" / "golden" / "verl_karmarkar_karp.json").read_text())["cases"]
    assert len(cases) == 30
    for case in cases:
        parts = karmarkar_karp(case["seqlens"], case["k"])
        assert sorted(sum(case["seqlens"][index] for index in part) for part in parts) == sorted(case["kk_sums"])


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.data())
def test_every_item_is_in_one_part_and_none_is_empty(weights, data):
    num_parts = data.draw(st.integers(1, len(weights)))
    parts = karmarkar_karp(weights, num_parts)
    assert len(parts) == num_parts
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=60), st.data())
def test_no_part_outweighs_another_by_more_than_the_heaviest_item(weights, data):
    parts = karmarkar_karp(weights, data.draw(st.integers(2, len(weights))))
    sums = [sum(weights[index] for index in part) for part in parts]
    assert max(sums) - min(sums) <= max(weights)


def test_more_parts_than_items_are_refused():
    with pytest.raises(TrainError, match="3 parts of 2 sequences"):
        karmarkar_karp([1, 2], 3)
