"""The staleness bound under any schedule: lag <= eta, every group exactly once, never a dead end."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from libra.policy import Admission, CommittedGroup, OpenBatch, OpenGate
from libra.policy.admission import KEPT_BATCHES


def simulate(eta: int, groups: int, iterations: int, seed: int, *, beside: bool = True) -> dict[int, list[int]]:
    """Run a whole training under a random schedule, versions published ``beside`` steps or before; lag of every group, by batch."""
    rng = random.Random(seed)
    admission = Admission(eta, groups)
    version = -1
    waiting: list[tuple[int, int]] = []  # gate open, not started
    running: dict[tuple[int, int], int] = {}  # started, with the version it started on
    started_with: dict[tuple[int, int], int] = {}
    submitted = 0
    lags: dict[int, list[int]] = {}
    training: list[int] = []
    trained: list[int] = []  # the step whose weights are not published yet

    def apply(commands: tuple[object, ...]) -> None:
        for command in commands:
            if isinstance(command, OpenGate):
                assert command.iteration - eta <= version
                waiting.extend((command.iteration, g) for g in range(groups))
            elif isinstance(command, OpenBatch):
                assert command.batch <= version + (beside and bool(trained))
                lags[command.batch] = [command.batch - started_with[m] for m in command.members]
                training.append(command.batch)

    def publish() -> None:
        nonlocal version
        version += 1
        apply(admission.version_published(version))

    publish()
    while len(lags) < iterations or training or trained:
        moves = ["start"] * bool(waiting) + ["finish"] * bool(running)
        moves += ["publish"] * bool(trained) + ["pass"] * bool(training)
        if submitted < iterations and submitted <= version + eta + 1:
            moves.append("submit")
        assert moves, f"dead end at version {version}, submitted {submitted}, batches {sorted(lags)}"
        match rng.choice(moves):
            case "submit":
                apply(admission.gate_parked(submitted))
                apply(admission.batch_parked(submitted))
                submitted += 1
            case "start":
                group = waiting.pop(rng.randrange(len(waiting)))
                running[group] = started_with[group] = version
                admission.generation_started(*group, version)
            case "finish":
                group = rng.choice(list(running))
                apply(admission.group_committed(CommittedGroup(*group, running.pop(group))))
            case "pass" if not trained:  # a step ends only once the version before it is published
                assert training[0] == version
                trained.append(training.pop(0))
                if beside:
                    apply(admission.step_ended(version))
            case "publish":
                trained.pop()
                publish()
    consumed = [m for members in admission.opened.values() for m in members]
    assert len(consumed) == len(set(consumed)) == iterations * groups
    return lags


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_lag_never_above_eta_and_every_group_consumed_once(
    eta: int, groups: int, iterations: int, seed: int, beside: bool
) -> None:
    lags = simulate(eta, groups, iterations, seed, beside=beside)
    assert sorted(lags) == list(range(iterations))
    assert all(0 <= lag <= eta for batch in lags.values() for lag in batch)


def test_lag_is_never_above_eta_in_ten_thousand_schedules() -> None:
    for seed in range(10_000):
        eta = seed % 4
        lags = simulate(eta, 1 + seed % 3, 1 + seed % 5, seed)
        assert all(0 <= lag <= eta for batch in lags.values() for lag in batch)


def test_the_bound_is_used_and_not_only_kept() -> None:
    lags = [lag for seed in range(40) for batch in simulate(2, 3, 10, seed).values() for lag in batch]
    assert set(lags) == {0, 1, 2}


def test_synchronous_batches_are_their_own_iteration() -> None:
    admission = Admission(0, 2)
    admission.version_published(0)
    assert isinstance(admission.gate_parked(0)[0], OpenGate)
    assert admission.gate_parked(1) == ()
    assert admission.batch_parked(0) == ()
    admission.generation_started(0, 1, 0)
    assert admission.group_committed(CommittedGroup(0, 1, 0)) == ()
    (opened,) = admission.group_committed(CommittedGroup(0, 0, 0))
    assert opened == OpenBatch(0, ((0, 0), (0, 1)), "2 groups committed, 0 carried over")


def test_a_group_told_twice_is_counted_once_and_a_batch_asked_twice_gets_the_same_members() -> None:
    admission = Admission(0, 2)
    admission.version_published(0)
    admission.batch_parked(0)
    admission.group_committed(CommittedGroup(0, 0, 0))
    assert admission.group_committed(CommittedGroup(0, 0, 0)) == ()
    (opened,) = admission.group_committed(CommittedGroup(0, 1, 0))
    assert isinstance(opened, OpenBatch)
    assert admission.group_committed(CommittedGroup(0, 1, 0)) == ()
    (again,) = admission.batch_parked(0)
    assert isinstance(again, OpenBatch) and again.members == opened.members


def test_a_group_without_any_token_still_counts() -> None:
    admission = Admission(1, 1)
    admission.version_published(0)
    admission.batch_parked(0)
    (opened,) = admission.group_committed(CommittedGroup(0, 0, -1))
    assert isinstance(opened, OpenBatch)


def train(admission: Admission, iterations: range, groups: int) -> None:
    for k in iterations:
        admission.version_published(k)
        admission.gate_parked(k)
        admission.batch_parked(k)
        for g in range(groups):
            admission.generation_started(k, g, k)
            admission.group_committed(CommittedGroup(k, g, k))


def test_its_size_does_not_grow_with_the_run_and_what_it_forgot_is_still_consumed() -> None:
    short, long = Admission(1, 3), Admission(1, 3)
    train(short, range(KEPT_BATCHES + 50), 3)
    train(long, range(KEPT_BATCHES + 5000), 3)
    assert len(long.opened) == len(short.opened) == KEPT_BATCHES + 1
    assert len(json.dumps(long.snapshot())) < 1.3 * len(json.dumps(short.snapshot()))
    for admission in (long, Admission.resumed(1, 3, version=-1, opened=every_batch(5064), committed=(), started={})):
        before = admission.snapshot()
        assert admission.batch_parked(7) == (OpenBatch(7, (), "opened long before; its members are in its file"),)
        admission.generation_started(7, 0, 7)
        assert admission.group_committed(CommittedGroup(7, 0, 7)) == ()
        assert admission.snapshot() == before


def every_batch(number: int) -> dict[int, tuple[tuple[int, int], ...]]:
    return {batch: tuple((batch, group) for group in range(3)) for batch in range(number)}


def test_a_snapshot_of_an_older_libra_has_every_batch_and_means_the_same() -> None:
    admission, restored = Admission(1, 3), Admission(0, 1)
    train(admission, range(200), 3)
    older = admission.snapshot()
    for name in ("consumed", "whole_below", "told_below"):
        del older[name]
    older["opened"] = [[batch, [list(group) for group in members]] for batch, members in every_batch(200).items()]
    restored.restore(older)
    assert restored.snapshot() == admission.snapshot()
