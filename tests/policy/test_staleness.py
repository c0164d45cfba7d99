"""Capacity against AReaL's own answers, and lag <= eta under any schedule of the ledger and of `Admission`."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from libra.policy import Admission, Capacity, OpenGate, StalenessLedger


def test_capacity_is_areals_after_every_event(repository) -> None:
    cases = json.loads((repository / "tests" / "golden" / "areal_staleness.json").read_text())["cases"]
    assert len(cases) == 20
    for case in cases:
        capacity = Capacity(case["max_staleness"], case["consumer_batch_size"], case["max_concurrent_rollouts"])
        assert capacity.pending_limit == case["pending_limit"]
        apply = {
            "enq": lambda version, c=capacity: c.group_enqueued(),
            "submit": lambda version, c=capacity: c.group_submitted(),
            "accept": lambda version, c=capacity: c.group_accepted(),
            "reject": lambda version, c=capacity: c.group_rejected(),
            "version": lambda version, c=capacity: c.version_published(version),
            "recover": lambda version, c=capacity: c.version_recovered(version),
        }
        for index, (op, version, *expected) in enumerate(case["events"]):
            apply[op](version)
            got = [capacity.available, capacity.enqueued, capacity.running, capacity.accepted, capacity.rejected]
            assert (capacity.version, got) == (version, expected), f"event {index}, {op}"


def simulate(seed: int) -> tuple[int, list[int], int]:
    """One random schedule; (eta, lag of every group consumed, groups dropped). Engines may serve old versions."""
    rng = random.Random(seed)
    eta, groups, max_running = rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 9)
    num_batches = rng.randint(1, 5)
    capacity = Capacity(eta, groups, max_running)
    ledger = StalenessLedger(capacity)
    # How often an engine serves a version older than the newest, and how the moves are weighted, differ by schedule.
    old_engines = rng.choice((0.0, 0.0, 0.3))
    moves = {name: rng.random() + 0.05 for name in ("reserve", "commit", "reject", "consume")}
    ends: Counter[int] = Counter()
    running: dict[int, int] = {}
    oldest: dict[int, int] = {}
    lags: list[int] = []
    batch = dropped = admitted = 0
    while batch < num_batches:
        (move,) = rng.choices(list(moves), list(moves.values()))
        if move == "reserve":
            available = capacity.available
            assert ledger.reserve(admitted) == (available > 0)
            if available > 0:
                running[admitted] = capacity.version
                admitted += 1
            else:  # invariant 4: either something is on its way, or a batch can be had
                assert running or len(oldest) >= groups
            assert capacity.running <= max_running
            assert capacity.running + capacity.accepted <= (eta + capacity.version + 1) * groups
        elif move in ("commit", "reject") and running:
            group = rng.choice(list(running))
            version = running.pop(group)
            if move == "reject":
                ledger.reject(group)
                ends[group] += 1
            elif rng.random() < old_engines:
                oldest[group] = version - rng.randint(0, 2)
                ledger.commit(group, oldest[group])
            else:
                oldest[group] = version
                ledger.commit(group)
        elif move == "consume":
            answer = ledger.consume(batch)
            ends.update(answer.dropped)
            ends.update(answer.members)
            dropped += len(answer.dropped)
            assert all(batch - oldest.pop(group) > eta for group in answer.dropped)
            assert len(answer.members) in (0, groups)
            if answer.members:
                lags += [batch - oldest.pop(group) for group in answer.members]
                batch += 1
                ledger.version_published(batch)
    assert capacity.running == len(running)
    assert set(ends.values()) <= {1}
    assert sorted([*ends, *running, *oldest]) == list(range(admitted))
    return eta, lags, dropped


def test_lag_is_never_above_eta_in_ten_thousand_schedules() -> None:
    results = [simulate(seed) for seed in range(10_000)]
    assert all(0 <= lag <= eta for eta, lags, _ in results for lag in lags)
    # The schedules have the power to see it: the bound is reached for every eta, and the check at consumption acts.
    assert {eta for eta, lags, _ in results if eta in lags} == {0, 1, 2, 3}
    assert sum(dropped for _, _, dropped in results) > 1000


def test_gates_admit_as_many_groups_as_the_capacity_rule() -> None:
    for eta in range(4):
        for groups in (1, 3):
            admission, capacity = Admission(eta, groups), Capacity(eta, groups, max_running=10**6)
            commands = [command for iteration in range(20) for command in admission.gate_parked(iteration)]
            for version in range(6):
                commands += admission.version_published(version)
                capacity.version_published(version)
                begun = groups * sum(isinstance(command, OpenGate) for command in commands)
                assert begun == capacity.available


def test_a_recovered_run_admits_one_window_and_no_more() -> None:
    ledger = StalenessLedger(Capacity(1, 4, max_running=100))
    ledger.version_recovered(50)
    assert sum(ledger.reserve(group) for group in range(100)) == 8
    for group in range(4):
        ledger.commit(group)
    assert set(ledger.consume(50).members) == {0, 1, 2, 3}


def test_oldest_groups_go_first_and_a_dropped_one_makes_room() -> None:
    ledger = StalenessLedger(Capacity(1, 1, max_running=9))
    assert [ledger.reserve(group) for group in "abc"] == [True, True, False]
    ledger.commit("b", 0)
    assert ledger.consume(0).members == ("b",)
    ledger.version_published(1)
    assert ledger.reserve("c")
    ledger.commit("c")
    assert ledger.consume(1).members == ("c",)
    ledger.version_published(2)
    ledger.commit("a")
    before = ledger.capacity.available
    answer = ledger.consume(2)
    assert (answer.members, answer.dropped) == ((), ("a",))
    assert answer.reason == "0 of 1 groups wait within lag 1"
    assert ledger.capacity.available == before + 1


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda ledger: ledger.reserve("a"), "holds a place already"),
        (lambda ledger: ledger.commit("b"), "not running"),
        (lambda ledger: ledger.reject("b"), "not running"),
        (lambda ledger: ledger.consume(1), "the next step is 0"),
    ],
)
def test_what_is_out_of_order_is_refused(act, says) -> None:
    ledger = StalenessLedger(Capacity(1, 1, max_running=9))
    ledger.reserve("a")
    with pytest.raises(ValueError, match=says):
        act(ledger)


@pytest.mark.parametrize(("eta", "groups", "max_running"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_a_ledger_that_could_not_work_is_refused(eta, groups, max_running) -> None:
    with pytest.raises(ValueError, match=f"got eta={eta}, groups_per_batch={groups}, max_running={max_running}"):
        StalenessLedger(Capacity(eta, groups, max_running))
