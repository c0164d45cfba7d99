"""DORA's rule of rounding: the shares of live versions, all engines given out, none of them to versions without work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra.policy.version_shares import version_shares


def test_shares_are_rounded_and_the_newest_version_has_the_rest() -> None:
    assert version_shares(16, {3: 40, 4: 120, 5: 352}) == {3: 1, 4: 4, 5: 11}
    assert version_shares(4, {1: 1, 2: 999}) == {1: 1, 2: 3}  # it has work, and so an engine
    assert version_shares(4, {1: 0, 2: 7}) == {2: 4}
    assert version_shares(4, {}) == {}


@given(st.integers(1, 40), st.dictionaries(st.integers(0, 5), st.integers(0, 500), max_size=4))
def test_all_engines_have_a_version_with_trajectories(engines: int, under_way: dict[int, int]) -> None:
    live = {version for version, count in under_way.items() if count}
    shares = version_shares(engines, under_way)
    assert set(shares) == live and all(share >= 1 for share in shares.values())
    if live:
        assert sum(shares.values()) == max(engines, len(live))
        exact = {version: engines * under_way[version] / sum(under_way.values()) for version in live - {max(live)}}
        if all(count >= 1 for count in exact.values()) and engines >= len(live):
            assert all(abs(shares[version] - count) <= 1.5 for version, count in exact.items())
