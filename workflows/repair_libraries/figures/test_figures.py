import pytest

import figures


def test_total():
    assert figures.total([1, 2, 3]) == 6
    assert figures.total([]) == 0


def test_mean():
    assert figures.mean([1, 2, 6]) == 3


def test_mean_of_nothing():
    with pytest.raises(ValueError):
        figures.mean([])


def test_median():
    assert figures.median([9, 1, 5]) == 5
    assert figures.median([9, 1, 5, 3]) == 4
    assert figures.median([7]) == 7


def test_spread():
    assert figures.spread([4, -1, 2]) == 5


def test_variance():
    assert figures.variance([1, 3, 5]) == pytest.approx(8 / 3)
    assert figures.variance([2, 2]) == 0


def test_running():
    assert figures.running([1, 2, 3]) == [1, 3, 6]


def test_differences():
    assert figures.differences([1, 4, 2]) == [3, -2]
    assert figures.differences([1]) == []


def test_moving_mean():
    assert figures.moving_mean([1, 3, 5, 7], 2) == [2, 4, 6]
    assert figures.moving_mean([1, 3], 2) == [2]


def test_clipped():
    assert figures.clipped([1, 5, 9], 3, 7) == [3, 5, 7]


def test_share_above():
    assert figures.share_above([1, 2, 3, 4], 2) == 0.5


def test_rising():
    assert figures.rising([1, 2, 5])
    assert not figures.rising([1, 2, 2])
    assert not figures.rising([2, 1])


def test_longest_run():
    assert figures.longest_run([1, 1, 2, 2, 2, 1]) == 3
    assert figures.longest_run([3, 1, 3]) == 1
    assert figures.longest_run([]) == 0
