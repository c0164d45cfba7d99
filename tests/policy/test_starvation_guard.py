"""The bound on waiting, for every ordering that has one: nobody is passed over more often than it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config.models import PolicySection
from libra.policy import (
    CMLFQ,
    CompletedCalls,
    Mlfq,
    Oracle,
    Ordering,
    Priority,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryParked,
    starvation_guard,
)
from libra.policy.attained_service import PATIENCE as DEFAULT
from libra.policy.starvation_guard import StarvationGuard
from libra.types import Phase

PATIENCE = 32
LENGTHS = {f"long-{i}": 10_000 * (i + 1) for i in range(40)} | {"short": 10}
ORDERINGS = {
    "oracle": lambda: Oracle(LENGTHS, patience=PATIENCE),
    "mlfq": lambda: Mlfq(patience=PATIENCE),
    "completed_calls": lambda: CompletedCalls(patience=PATIENCE),
    "cmlfq": lambda: CMLFQ(patience=PATIENCE),
}


class Queue:
    """One phase, one slot: whoever is first in order is dispatched, runs, and parks again."""

    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.waiting: dict[str, Priority] = {}
        self.passed: dict[str, int] = {}
        self.bound: dict[str, int] = {}

    def park(self, key: str) -> None:
        self.bound[key] = 2 * len(self.waiting) + PATIENCE
        self.passed[key] = 0
        self.waiting[key] = Priority(9, 9, 9)
        for command in self.ordering.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0)):
            if isinstance(command, SetPriority) and command.key in self.waiting:
                self.waiting[command.key] = command.priority

    def dispatch(self) -> str:
        key = min(self.waiting, key=lambda k: (self.waiting[k], k))
        del self.waiting[key]
        for other in self.waiting:
            self.passed[other] += 1
            assert self.passed[other] <= self.bound[other], other
        self.ordering.handle(QuantumStarted(key, Phase.ROLLOUT, "w"))
        self.ordering.handle(QuantumFinished(key, Phase.ROLLOUT, 100, "", "", 1.0))
        self.ordering.handle(QuantumFinished(key, Phase.TOOL, 0, "bash", "ok", 1.0))
        return key


@pytest.mark.parametrize("name", ORDERINGS)
@settings(max_examples=10, deadline=None)
@given(num=st.integers(2, 40), data=st.data())
def test_nobody_is_passed_over_more_often_than_the_bound(name: str, num: int, data: st.DataObject) -> None:
    queue = Queue(ORDERINGS[name]())
    for key in data.draw(st.permutations(["short", *(f"long-{i}" for i in range(num))])):
        queue.park(key)
    for _ in range(150):
        queue.park(queue.dispatch())


def test_without_patience_the_short_one_would_starve() -> None:
    """The bound is what moves it: with endless patience it never runs."""
    for patience, runs in ((PATIENCE, True), (10**9, False)):
        queue = Queue(Oracle(LENGTHS, patience=patience))
        queue.bound = dict.fromkeys(LENGTHS, 10**9)
        for key in LENGTHS:
            queue.park(key)
            queue.bound[key] = 10**9
        ran = set()
        for _ in range(200):
            key = queue.dispatch()
            ran.add(key)
            queue.park(key)
            queue.bound[key] = 10**9
        assert ("short" in ran) is runs


def test_phases_are_counted_apart() -> None:
    patience = StarvationGuard(5)
    assert patience.parked("a", Phase.ROLLOUT) == []
    for i in range(20):
        told = patience.parked(f"t{i}", Phase.TOOL)
        assert "a" not in [key for key, _ in told]
    found = [told for i in range(5) for told in patience.parked(f"r{i}", Phase.ROLLOUT)]
    assert found == [("a", 1)]


def test_by_default_nobody_is_overdue_within_one_large_iteration() -> None:
    """3,000 trajectories of 42 turns; those that have not begun wait while the others park again and again."""
    patience = StarvationGuard(DEFAULT)
    patience.parked("unbegun", Phase.ROLLOUT)
    for turn in range(3_000 * 42):
        assert not patience.parked(f"k{turn % 3_000}", Phase.ROLLOUT)
    assert PolicySection().patience == DEFAULT


def test_those_that_left_are_not_remembered_until_they_would_have_been_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for fewest in (4, 10**9):
        monkeypatch.setattr(starvation_guard, "FEWEST_SORTED", fewest)
        guard = StarvationGuard(300)
        found = []
        for number in range(5_000):
            found += guard.parked(f"k{number}", Phase.ROLLOUT)
            if number % 50:  # every fiftieth waits until it is overdue
                guard.left(f"k{number}")
            if fewest == 4:
                assert len(guard._due[Phase.ROLLOUT]) <= 4 * guard._num_waiting[Phase.ROLLOUT] + 4
        told.append(found)
    assert told[0] == told[1] and len(told[0]) > 80
