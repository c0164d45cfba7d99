"""The number of tool workers: bounds, hysteresis, prices, and no decision that the next one takes back."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from libra.facts import ToolWorkersOrdered
from libra.policy.tool_fleet import HOLD, IDLE_S, ToolFleet, ordered

BUSY = ToolWorkersOrdered(1, 4, 1, 0, 2, 20, 200.0, 60.0, 15.0)


def test_more_workers_where_many_actions_wait_for_long():
    order = ordered(BUSY)
    assert order is not None and 1 < order.ordered <= 4 and order.give_up == ""
    assert "20 actions wait, for 60 s now" in order.reason


@pytest.mark.parametrize(
    "change",
    [
        {"behind_s": HOLD * 15.0 - 1},  # not for long
        {"waiting_s": 29.0},  # what waits is done before another worker has started
        {"waiting": 1, "waiting_s": 40.0},  # it saves less than its price
        {"starting": 1},  # one is on its way
        {"wanted": 4},  # there are as many as there may be
        {"start_s": 120.0},  # starting takes longer than waiting
    ],
)
def test_no_more_workers_otherwise(change):
    assert ordered(replace(BUSY, **change)) is None


def test_an_idle_worker_is_given_up_after_a_while_and_only_if_nothing_waits():
    idle = ToolWorkersOrdered(1, 4, 3, 0, 6, 0, 0.0, 0.0, 15.0, (("tool-1", IDLE_S - 1), ("tool-2", IDLE_S)))
    assert ordered(idle) == replace(idle, ordered=2, give_up="tool-2", reason="tool-2 has had nothing to do for 60 s")
    for change in ({"waiting": 1, "waiting_s": 1.0}, {"starting": 1}, {"wanted": 1}, {"start_s": 31.0}):
        assert ordered(replace(idle, **change)) is None


@dataclass
class Cluster:
    """Workers of one core that start after a while, and actions of a second."""

    fleet: ToolFleet
    start_s: float
    present: list[str]
    queue: int = 0
    running: int = 0
    starts: list[tuple[float, str]] = field(default_factory=list)
    orders: list[tuple[float, ToolWorkersOrdered]] = field(default_factory=list)

    def second(self, at_s, arrivals):
        for due in [due for due in self.starts if due[0] <= at_s]:
            self.starts.remove(due)
            self.present.append(due[1])
        self.queue += arrivals
        self.running = min(self.queue, len(self.present))
        self.queue -= self.running
        busy = self.present[: self.running]
        facts = self.fleet.facts(
            at_s, present=frozenset(self.present), idle=frozenset(self.present[self.fleet.least :]) - set(busy),
            units=len(self.present), waiting=self.queue, waiting_s=float(self.queue),
        )  # fmt: skip
        order = ordered(facts)
        if order is None:
            return
        assert order.ordered != self.fleet.wanted
        if order.give_up:
            assert order.give_up in self.present and order.give_up not in busy and not self.queue
            self.present.remove(order.give_up)
        else:
            new = range(order.ordered - self.fleet.wanted)
            self.starts += [(at_s + self.start_s, f"extra-{at_s}-{number}") for number in new]
        self.fleet.follow(order, at_s)
        self.orders.append((at_s, order))
        assert self.fleet.least <= self.fleet.wanted <= self.fleet.most


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8), st.sampled_from([2.0, 15.0, 40.0]), st.integers(1, 3),
    st.integers(0, 6),
)  # fmt: skip
def test_bounds_hold_and_a_constant_load_settles(loads, start_s, least, extra):
    cluster = Cluster(ToolFleet(least, least + extra), start_s, [f"tool-{n}" for n in range(least)])
    at = 0
    for load in loads:
        for _ in range(300):
            cluster.second(float(at), load)
            at += 1
    settled = at + 1200
    while at < settled + 600:
        cluster.second(float(at), loads[-1])
        at += 1
    late = [order for at_s, order in cluster.orders if at_s >= settled]
    up = sum(not order.give_up for order in late)
    assert up == 0 or all(not order.give_up for order in late)  # it may still shrink, or still grow: not both
    for (before_s, before), (after_s, after) in zip(cluster.orders, cluster.orders[1:], strict=False):
        if before.give_up and not after.give_up:
            assert after_s - before_s >= HOLD * min(start_s, cluster.fleet.start_s) - 1
        if after.give_up and not before.give_up:
            assert after_s - before_s >= IDLE_S
