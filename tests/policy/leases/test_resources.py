"""Quotas: never exceeded in any window, never held back for no reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.facts import Priority
from libra.policy.leases.resources import LeaseRequest, Quota, Resources, read_quota
from libra.policy.leases.table import LeaseTable


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.3, 1.1]), st.integers(1, 3)), max_size=60))
def test_a_rate_holds_in_every_window_and_nothing_waits_longer_than_it_must(units, arrivals):
    quota, at_s, granted = Quota(units, 1.0), 0.0, list[tuple[float, int]]()
    for wait_s, wanted in arrivals:
        at_s += wait_s
        in_window = sum(u for t, u in granted if t + 1.0 > at_s)
        assert quota.may(at_s, wanted) == (in_window + wanted <= units)
        if wanted <= units:
            next_s = quota.next_s(at_s, wanted)
            assert sum(u for t, u in granted if t + 1.0 > next_s) + wanted <= units
        if quota.may(at_s, wanted):
            quota.take(at_s, wanted)
            granted.append((at_s, wanted))


def test_ten_a_second_is_never_exceeded_and_used_in_full():
    table, num, at_s, granted = LeaseTable(), 200, 0.0, list[float]()
    table.supply("a", Resources(slots=num))
    table.limit("search", read_quota("search", "10/s"))
    for number in range(num):
        table.request(LeaseRequest(str(number), Resources(1, quotas=(("search", 1),))), Priority(0, 0, 0))
    while len(granted) < num:
        at_s = table.next_s(at_s) or at_s
        for lease in table.admit(at_s):
            granted.append(at_s)
            table.release(lease.holder)
    assert all(later >= earlier + 1.0 for earlier, later in zip(granted, granted[10:], strict=False))
    assert granted[-1] < num / 10


@pytest.mark.parametrize(
    ("text", "units", "per_s"),
    [("10/s", 10, 1.0), (" 300 / min", 300, 60.0), ("5000/h", 5000, 3600.0), (4, 4, None), ("4", 4, None)],
)
def test_what_a_configuration_writes(text, units, per_s):
    quota = read_quota("search", text)
    assert (quota.units, quota.per_s) == (units, per_s)


@pytest.mark.parametrize("text", [0, "0/s", "-1/s", "ten/s", "10/day", True, "1.5/s"])
def test_what_is_no_quota_is_refused_with_what_to_type(text):
    with pytest.raises(ConfigError, match="search"):
        read_quota("search", text)
