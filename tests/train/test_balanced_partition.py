import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import greedy_partition, karmarkar_karp, partition_groups

METHODS = (karmarkar_karp, greedy_partition)


def sums_of(parts, weights):
    return sorted(sum(weights[index] for index in part) for part in parts)


def spread(parts, weights):
    sums = sums_of(parts, weights)
    return sums[-1] - sums[0]


@st.composite
def weights_and_parts(draw, smallest=0):
    """Weights, a number of parts, and whether that divides the number of weights by construction."""
    num_parts = draw(st.integers(1, 8))
    equal_size = draw(st.booleans())
    count = num_parts * draw(st.integers(1, 8)) if equal_size else draw(st.integers(num_parts, 60))
    return draw(st.lists(st.integers(smallest, 5000), min_size=count, max_size=count)), num_parts, equal_size


def test_sums_are_verls(repository):
    cases = json.loads((repository / "tests" / "golden" / "verl_karmarkar_karp.json").read_text())["cases"]
    better = 0
    for case in cases:
        weights, equal_size = case["seqlens"], case["equal_size"]
        assert sums_of(karmarkar_karp(weights, case["k"], equal_size=equal_size), weights) == sorted(case["kk_sums"])
        greedy = greedy_partition(weights, case["k"], equal_size=equal_size)
        assert greedy == case["greedy_partitions"]
        gained = spread(greedy, weights) - spread(karmarkar_karp(weights, case["k"], equal_size=equal_size), weights)
        better += gained > 0
        assert gained >= 0
    assert better > 20


@pytest.mark.parametrize("method", METHODS)
@given(given=weights_and_parts())
def test_every_item_is_in_one_part_and_none_is_empty(method, given):
    weights, num_parts, equal_size = given
    parts = method(weights, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))
    if equal_size:
        assert {len(part) for part in parts} == {len(weights) // num_parts}


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data(), given=weights_and_parts())
def test_groups_stay_whole(method, data, given):
    group_weights, num_parts, equal_size = given
    groups, weights = [], []
    for group, _ in enumerate(group_weights):
        for weight in data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=3)):
            groups.append(f"g{group}")
            weights.append(weight)
    order = data.draw(st.permutations(range(len(groups))))
    groups, weights = [groups[index] for index in order], [weights[index] for index in order]
    parts = partition_groups(weights, groups, num_parts, equal_size=equal_size, method=method)
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))
    owners = [{groups[index] for index in part} for part in parts]
    assert sum(len(owner) for owner in owners) == len(set(groups))
    assert all(owners)
    if equal_size:
        assert len({len(owner) for owner in owners}) == 1
    heaviest = max(sum(w for w, g in zip(weights, groups, strict=True) if g == group) for group in set(groups))
    if method is karmarkar_karp or not equal_size:
        assert spread(parts, weights) <= heaviest


@pytest.mark.parametrize("method", METHODS)
def test_parts_that_cannot_be_are_refused(method):
    for ask in (
        lambda: method([1, 2], 3),
        lambda: method([1, 2, 3], 2, equal_size=True),
        lambda: partition_groups([1, 2], ["a"], 1, method=method),
    ):
        with pytest.raises(TrainError):
            ask()
