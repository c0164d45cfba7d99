"""A snapshot, through JSON and back, changes no later answer; a run that is resumed from disk goes on within its bound."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.policy import (
    ORDERINGS,
    Admission,
    CommittedGroup,
    Fifo,
    GroupsNamed,
    OpenBatch,
    OpenGate,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
)
from libra.policy.fleet import Fleet
from libra.policy.log_replay import _unlike
from libra.types import Phase

KEYS = st.sampled_from([f"trajectory-train-{i}-0-{s}-e0-demo" for i in range(3) for s in range(3)])
WORKERS = st.sampled_from(["a", "b"])
EVENTS = st.lists(
    st.one_of(
        st.builds(
            TrajectoryParked,
            KEYS,
            st.integers(0, 3),
            st.sampled_from(Phase),
            st.integers(0, 9),
            st.sampled_from(["", "g", "h"]),
            st.sampled_from(["", "f"]),
            st.integers(0, 500),
        ),
        st.builds(
            QuantumFinished,
            KEYS,
            st.sampled_from(Phase),
            st.integers(0, 99),
            st.just("t"),
            st.just("ok"),
            st.floats(0, 9),
            st.integers(0, 9),
            st.floats(0, 9),
        ),
        st.builds(TrajectoryEnded, KEYS),
        st.builds(GroupsNamed, st.just((("g", "p"), ("h", "q")))),
        st.builds(QuantumStarted, KEYS, st.sampled_from(Phase), WORKERS),
        st.builds(WorkerJoined, WORKERS, st.sampled_from(["tp1", "tp4"]), st.integers(0, 2), st.integers(0, 2)),
        st.builds(WorkerLeft, WORKERS),
        st.builds(VersionPublished, st.integers(0, 3)),
    ),
    max_size=40,
)
NUMBERS = st.integers(0, 5)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("gate_parked"), NUMBERS),
        st.tuples(st.just("batch_parked"), NUMBERS),
        st.tuples(st.just("version_published"), NUMBERS),
        st.tuples(st.just("step_ended"), NUMBERS),
        st.tuples(st.just("generation_started"), NUMBERS, st.integers(0, 2), NUMBERS),
        st.tuples(st.just("group_committed"), st.builds(CommittedGroup, NUMBERS, st.integers(0, 2), st.integers(-1, 5))),
    ),
    max_size=60,
)  # fmt: skip


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, allow_nan=False))


@pytest.mark.parametrize("kind", ORDERINGS.values(), ids=ORDERINGS)
@given(before=EVENTS, after=EVENTS)
def test_an_ordering_goes_on_from_its_snapshot(kind: type, before: list[Any], after: list[Any]) -> None:
    original, restored = kind(), kind()
    for event in before:
        original.handle(event)
    restored.handle(TrajectoryParked("something else", 0, Phase.ROLLOUT, 0))  # forgotten by restore
    restored.restore(through_json(original.snapshot()))
    assert [restored.handle(event) for event in after] == [original.handle(event) for event in after]
    assert restored.snapshot() == original.snapshot()


@given(before=EVENTS)
def test_a_fleet_comes_back_from_its_snapshot(before: list[Any]) -> None:
    original, restored = Fleet(), Fleet()
    exchanges = WorkerJoined("c", "tp1", 2, 0, 100, 0.1, 0.2, kv_token_bytes=10)
    turn = QuantumFinished("own", Phase.ROLLOUT, 5, "t", "ok", 3.0, 9, 1.0)
    for event in [*before, exchanges, QuantumStarted("own", Phase.ROLLOUT, "c"), turn]:
        original.handle(event)
    restored.restore(through_json(original.snapshot()))
    assert restored.hosts == original.hosts and restored.home == original.home
    assert restored.hosts["c"].open_tokens == original.hosts["c"].open_tokens > 100


@given(eta=st.integers(0, 2), groups=st.integers(1, 3), before=CALLS, after=CALLS)
def test_admission_goes_on_from_its_snapshot(eta: int, groups: int, before: list[Any], after: list[Any]) -> None:
    original, restored = Admission(eta, groups), Admission(9, 9)
    for name, *arguments in before:
        getattr(original, name)(*arguments)
    restored.restore(through_json(original.snapshot()))
    for name, *arguments in after:
        assert getattr(restored, name)(*arguments) == getattr(original, name)(*arguments)
    assert restored.snapshot() == original.snapshot()
    assert restored.opened == original.opened


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(KeyError, match="arrivals"):
        Fifo().restore({})
    with pytest.raises(KeyError, match="version"):
        Admission(0, 1).restore({"eta": 0, "groups_per_batch": 1})


Group = tuple[int, int]
ITERATIONS = 6


class Disk:
    """What survives a scheduler: published version, batch memberships, journals and group records."""

    def __init__(self) -> None:
        self.version = -1
        self.opened: dict[int, tuple[Group, ...]] = {}
        self.started: dict[Group, int] = {}
        self.committed: dict[Group, int] = {}

    def admission(self, eta: int, groups: int) -> Admission:
        return Admission.resumed(
            eta,
            groups,
            version=self.version,
            opened=self.opened,
            committed=[CommittedGroup(*group, oldest) for group, oldest in self.committed.items()],
            started={group: oldest for group, oldest in self.started.items() if group not in self.committed},
        )


def live(disk: Disk, eta: int, groups: int, rng: random.Random, moves: int) -> None:
    """Up to ``moves`` moves of a random schedule that begins with what disk holds."""
    admission = disk.admission(eta, groups)
    waiting: list[Group] = []
    running: list[Group] = []
    training: list[int] = []
    submitted = 0

    def apply(commands: tuple[Any, ...]) -> None:
        for command in commands:
            if isinstance(command, OpenGate):
                asked = [(command.iteration, g) for g in range(groups)]
                waiting.extend(group for group in asked if group not in disk.committed)
            elif isinstance(command, OpenBatch) and command.batch not in disk.opened:
                disk.opened[command.batch] = command.members
                training.append(command.batch)

    def publish() -> None:
        disk.version += 1
        apply(admission.version_published(disk.version))

    while disk.version < len(disk.opened):  # the steps of committed batches are repeated, what is missing is published
        publish()
    trained = 0
    for _ in range(moves):
        submits = submitted < min(ITERATIONS, disk.version + eta + 2)
        ready = (waiting, running, trained, training and not trained, submits)
        possible = [
            move for move, able in zip(("start", "finish", "publish", "train", "submit"), ready, strict=True) if able
        ]
        if disk.version == ITERATIONS:
            return
        assert possible, f"dead end at version {disk.version}"
        match rng.choice(possible):
            case "submit":
                apply(admission.gate_parked(submitted))
                apply(admission.batch_parked(submitted))
                submitted += 1
            case "start":
                group = waiting.pop(rng.randrange(len(waiting)))
                running.append(group)
                disk.started.setdefault(group, disk.version)
                admission.generation_started(*group, disk.version)
            case "finish":
                group = running.pop(rng.randrange(len(running)))
                disk.committed[group] = disk.started[group]
                apply(admission.group_committed(CommittedGroup(*group, disk.started[group])))
            case "train":
                batch = min(training)
                training.remove(batch)
                assert batch == disk.version
                assert all(0 <= batch - disk.started[group] <= eta for group in disk.opened[batch])
                trained = 1
                apply(admission.step_ended(batch))
            case "publish":
                trained = 0
                publish()


@given(
    eta=st.integers(0, 3),
    groups=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 60), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_a_run_resumed_from_disk_consumes_every_group_once_and_in_time(
    eta: int, groups: int, cuts: list[int], seed: int
) -> None:
    disk, rng = Disk(), random.Random(seed)
    for moves in (*cuts, 10_000):
        live(disk, eta, groups, rng, moves)
    consumed = [group for members in disk.opened.values() for group in members]
    assert sorted(disk.opened) == list(range(ITERATIONS))
    assert len(consumed) == len(set(consumed)) == ITERATIONS * groups


def test_numbers_of_snapshots_may_differ_by_noise_and_by_nothing_more() -> None:
    said = {"gram": [[1.0, 2.0], [3.0, 4e6]], "count": 3}
    assert _unlike(said, {"gram": [[1.0, 2.0 + 1e-12], [3.0, 4e6 + 1e-4]], "count": 3}, "order") == ""
    assert "order.gram[1][0]: logged 3.0, now 3.001" in _unlike(
        said, {**said, "gram": [[1.0, 2.0], [3.001, 4e6]]}, "order"
    )
    assert "order.count: logged 3, now 4" in _unlike(said, {**said, "count": 4}, "order")
    assert "order.gram" in _unlike(said, {"count": 3}, "order")
