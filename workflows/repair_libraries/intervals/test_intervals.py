import pytest

from intervals import (
    contains,
    covered,
    gaps,
    intersection,
    length,
    merged,
    midpoint,
    overlaps,
    shifted,
    widened,
)


@pytest.mark.parametrize("value, inside", [(0, False), (1, True), (2, True), (3, True), (4, False)])
def test_contains(value, inside):
    assert contains((1, 3), value) is inside


def test_length():
    assert length((2, 7)) == 5
    assert length((4, 4)) == 0


def test_overlaps():
    assert overlaps((1, 3), (3, 5))
    assert overlaps((3, 5), (1, 3))
    assert overlaps((1, 9), (4, 5))
    assert not overlaps((1, 2), (3, 4))
    assert not overlaps((3, 4), (1, 2))


def test_intersection():
    assert intersection((1, 5), (3, 9)) == (3, 5)
    assert intersection((1, 2), (3, 4)) is None


def test_intersection_in_a_point():
    assert intersection((1, 3), (3, 4)) == (3, 3)


def test_shifted():
    assert shifted((1, 2), 3) == (4, 5)


def test_widened():
    assert widened((4, 8), 1) == (3, 9)
    assert widened((4, 8), -2) == (6, 6)


def test_widened_to_nothing():
    with pytest.raises(ValueError, match="nothing"):
        widened((4, 8), -3)


def test_merged():
    assert merged([(5, 6), (1, 3), (2, 4)]) == [(1, 4), (5, 6)]
    assert merged([(1, 9), (2, 3)]) == [(1, 9)]
    assert merged([]) == []


def test_merged_at_an_end():
    assert merged([(1, 2), (2, 3)]) == [(1, 3)]


def test_covered():
    assert covered([(1, 3), (2, 5), (7, 8)]) == 5


def test_gaps():
    assert gaps([(1, 2), (4, 5), (9, 9)]) == [(2, 4), (5, 9)]
    assert gaps([(1, 2)]) == []


def test_midpoint():
    assert midpoint((1, 4)) == 2.5
