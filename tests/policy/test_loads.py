"""What is believed of engines: sums kept event by event are those of all members, and the longest stands out as far as it does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.policy import QuantumFinished, QuantumStarted, TrajectoryParked, WorkerJoined
from libra.policy.fleet import Fleet
from libra.policy.loads import UNSURE, Loads
from libra.types import Phase

KEYS = [f"t{k}" for k in range(6)]
WORKERS = ["a", "b"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("believe"), st.sampled_from(KEYS), st.integers(0, 10**6), st.integers(1, 10**6)),
        st.tuples(st.just("generated"), st.sampled_from(KEYS), st.integers(0, 10**5)),
        st.tuples(st.just("settle"), st.sampled_from(KEYS), st.sampled_from([*WORKERS, None])),
        st.tuples(st.just("end"), st.sampled_from(KEYS)),
    ),
    max_size=60,
)


def engines() -> tuple[Fleet, Loads]:
    fleet = Fleet()
    for worker in WORKERS:
        fleet.handle(WorkerJoined(worker, "tp2", 8, 0, 100_000, 0.01, 0.03, 1e-5))
    return fleet, Loads(fleet)


def take(fleet: Fleet, loads: Loads, step: tuple[Any, ...]) -> None:
    match step:
        case ("believe", key, left, final):
            loads.believe(key, float(left), float(final))
        case ("generated", key, tokens):
            fleet.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 1.0))
            loads.generated(key, tokens)
        case ("settle", key, worker):
            loads.settle(key, worker)
        case ("end", key):
            loads.end(key)


def brute_s(loads: Loads, worker: str, more: tuple[float, float]) -> float:
    """When an engine is over with one more, from its members as they are."""
    load = loads._loads.get(worker)
    members = [(left, work) for _, left, work in load.members.values()] if load is not None else []
    members.append(more)
    peak = sum((left / 1000) ** UNSURE for left, _ in members) ** (1 / UNSURE) * 1000
    return 0.01 * peak + 0.02 / 100_000 * sum(work for _, work in members)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_sums_are_those_of_all_members_after_any_events(steps: list[tuple[Any, ...]]) -> None:
    fleet, loads = engines()
    loads.believe("new", 100.0, 300.0)
    for step in steps:
        take(fleet, loads, step)
        for worker in WORKERS:
            expected = brute_s(loads, worker, (100.0, 100.0 * 0.5 * 300.0))
            assert loads.finish_s("new", worker) == pytest.approx(expected, rel=1e-3)


def test_one_long_trajectory_is_the_end_and_many_short_ones_are_later_than_one() -> None:
    fleet, loads = engines()
    for key in KEYS[:5]:
        fleet.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0))
        fleet.handle(QuantumStarted(key, Phase.ROLLOUT, "a"))
        loads.believe(key, 1000.0, 1000.0)
        loads.settle(key, "a")
    work_s = 0.02 / 100_000 * loads._loads["a"].work
    assert loads.finish_s(KEYS[0], "a") - work_s == pytest.approx(0.01 * 1000 * 5 ** (1 / UNSURE))
    loads.believe("long", 50_000.0, 50_000.0)
    alone_s = loads.finish_s("long", "b")
    beside_s = loads.finish_s("long", "a")
    assert alone_s < beside_s
    assert beside_s - alone_s == pytest.approx(work_s, rel=0.02)  # the others do not make the longest any longer
