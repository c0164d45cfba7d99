"""Speed-up curves: what may be declared, and what is measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.policy.leases.elastic import SpeedUp


def test_speeds_are_relative_to_the_least_and_sizes_between_have_that_of_the_smaller():
    curve = SpeedUp(2, 8, {2: 2.0, 4: 3.0, 8: 4.0})
    assert curve.sizes == (2, 4, 8)
    assert [curve.speed(cores) for cores in (2, 3, 4, 7, 8)] == [1.0, 1.0, 1.5, 1.5, 2.0]
    assert SpeedUp(1, 3, [1, 1.5, 1.5]).speed(3) == 1.5


@pytest.mark.parametrize(
    "declared",
    [[1, -2, 3, 4], [1, 2, 1.5, 4], [1, 2], {2: 1.0}, {1: 1.0, 9: 2.0}, {1: 1.0, 2: float("nan")}, "measured"],
)
def test_a_curve_that_makes_no_sense_is_refused(declared):
    with pytest.raises(ConfigError, match="tool 'tests'"):
        SpeedUp(1, 4, declared, "tool 'tests'")


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.0, 100.0)), max_size=100))
def test_a_measured_curve_never_falls_and_begins_at_one(samples):
    curve = SpeedUp(1, 8, "measure")
    for cores, seconds in samples:
        curve.ended(cores, seconds)
    speeds = [curve.speed(size) for size in curve.sizes]
    assert speeds == sorted(speeds)
    assert speeds[0] == 1.0
    counted = {size: sum(cores == size for cores, _ in samples) for size in curve.sizes}
    rarest = min(counted.values())
    assert curve.unmeasured(8) == (next(s for s in curve.sizes if counted[s] == rarest) if rarest < 4 else None)
