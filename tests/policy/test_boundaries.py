"""Boundaries of a plan: where a trajectory begins, at what price at most, live as in the simulator, and again from the log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from libra.events import from_dict
from libra.policy import (
    CMLFQ,
    BoundariesSet,
    Dispatcher,
    Prefer,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerJoined,
    boundaries_of,
)
from libra.policy.dispatcher import PLANNED_FACTOR
from libra.policy.fleet import degree_of
from libra.policy.log_replay import replay
from libra.types import Phase

ROLLOUT = Phase.ROLLOUT


def engine(name: str, tp: int, token_s: float, slots: int = 4) -> WorkerJoined:
    return WorkerJoined(name, f"tp{tp}", slots, 0, 100_000, token_s, 2 * token_s, 1e-5)


def begun(dispatcher: Dispatcher, key: str, begins_tp: int, left: int = 1000) -> tuple[str, str]:
    """Worker and reason of a trajectory that is believed to have so many tokens left."""
    dispatcher.handle(TrajectoryParked(key, 0, ROLLOUT, 0))
    answers = CMLFQ().handle(TrajectoryParked(key, 0, ROLLOUT, 0))
    dispatcher.apply([answers[0], Prefer(key, (), "test", left, left, begins_tp)])
    (place,) = dispatcher.dispatch(ROLLOUT)
    return place.worker, place.reason


def fleet(slow_token_s: float, slots: int = 4) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.handle(engine("slow", 1, slow_token_s, slots))
    dispatcher.handle(engine("fast", 4, 0.010))
    return dispatcher


def test_a_trajectory_begins_where_the_plan_means_it_to_as_long_as_that_costs_little() -> None:
    little, much = 0.010 * (PLANNED_FACTOR - 0.05), 0.010 * (PLANNED_FACTOR + 0.05)
    assert begun(fleet(little), "t", 0)[0] == "fast"
    assert begun(fleet(little), "t", 1)[0] == "slow"
    assert begun(fleet(much), "t", 1)[0] == "fast"
    assert begun(fleet(little), "t", 2)[0] == "fast"  # the next higher degree that is there
    assert begun(fleet(0.001), "t", 5)[0] == "slow"  # there is none, and load decides


def test_no_slot_stays_free_for_a_boundary() -> None:
    dispatcher = fleet(0.0101, slots=1)
    assert [begun(dispatcher, key, 1)[0] for key in ("t", "u", "v")] == ["slow", "fast", "fast"]


@pytest.mark.parametrize(
    ("bucket", "tp"), [("tp4", 4), ("tp2-threads1", 2), ("vllm-tp8-threads1", 8), ("", 1), ("httpd9", 1)]
)
def test_the_degree_is_in_the_name_of_a_bucket(bucket: str, tp: int) -> None:
    assert degree_of(bucket) == tp


def test_whoever_waits_is_looked_at_anew_when_boundaries_are_set_and_it_survives_a_snapshot() -> None:
    policy = CMLFQ()
    keys = [f"trajectory-train-0-0-{k}-e0-demo" for k in range(3)]
    for key in keys:
        policy.handle(TrajectoryParked(key, 0, ROLLOUT, 0, "g"))
    policy.handle(QuantumStarted(keys[0], ROLLOUT, "a"))
    policy.handle(QuantumFinished(keys[0], ROLLOUT, 100, "", "", 1.0))
    policy.handle(TrajectoryEnded(keys[0]))
    answers = policy.handle(BoundariesSet(((1, 5.0), (2, 50_000.0))))
    assert [(a.key, a.begins_tp) for a in answers if isinstance(a, Prefer)] == [(key, 2) for key in keys[1:]]
    assert policy.handle(BoundariesSet(((1, 5.0), (2, 50_000.0)))) == ()
    other = CMLFQ()
    other.restore(json.loads(json.dumps(policy.snapshot())))
    late = TrajectoryParked("trajectory-train-0-1-0-e0-demo", 0, ROLLOUT, 0, "h")
    assert other.handle(late) == policy.handle(late)
    assert [a.begins_tp for a in other.handle(BoundariesSet(((1, 5.0),))) if isinstance(a, Prefer)] == []  # still TP 2
    policy.forget_live()
    assert "boundaries" not in policy.snapshot()


def test_boundaries_come_in_the_order_of_degrees() -> None:
    assert boundaries_of({"tp4": 9.0, "tp1": 3}) == ((1, 3.0), (4, 9.0))


def test_they_change_who_begins_where_live_as_in_the_simulator_and_in_the_replay(tmp_path: Path) -> None:
    from benchmarks import emulated_run
    from libra.hardware import engine_seconds
    from libra.hardware.virtual_engine import EngineTables
    from libra.policy import make_ordering
    from libra.sim import SimulationOptions, Simulator, synthetic
    from libra.sim import fleet as fleet_of
    from libra.store.event_log import EventReader

    tables = {tp: EngineTables(engine_seconds("A800-80G", "Qwen3-14B", tp)) for tp in (1, 2)}
    specs = fleet_of({1: 2, 2: 1}, tables, dict.fromkeys(tables, 6))
    workload = synthetic(6, turns=2, seed=3, group_size=6, name="bounds")
    policy = {"name": "cmlfq", "objective": "makespan", "patience": 200_000}
    homes = {}
    for name, boundaries in (("load", {}), ("planned", {"tp1": 1_000_000.0})):
        directory = tmp_path / name
        directory.mkdir()
        live, _ = asyncio.run(
            emulated_run.emulate(workload, specs, policy | {"boundaries_tokens": boundaries}, directory, tool_slots=6)
        )
        around = SimulationOptions(tool_slots=6, boundaries=boundaries_of(boundaries))
        outcome = Simulator(workload, specs, make_ordering(**policy), options=around).run()  # type: ignore[arg-type]
        first = {d.key: d.worker for d in reversed(outcome.dispatched) if d.phase is ROLLOUT}
        seen = {key: worker for phase, key, worker in reversed(live) if phase == "ROLLOUT"}
        homes[name] = sum(worker.startswith("tp1") for worker in first.values())
        assert sum(worker.startswith("tp1") for worker in seen.values()) == homes[name]
        log = [(line, from_dict(event)) for line, event in EventReader(directory / "events.jsonl")]
        assert not [told.difference for told in replay(log) if told.difference]
        assert len([event for _, event in log if event.name == "boundaries_set"]) == bool(boundaries)
    assert homes["planned"] > homes["load"]


def test_the_order_of_service_is_what_it_was() -> None:
    with_plan, without = CMLFQ(), CMLFQ()
    with_plan.handle(BoundariesSet(((1, 10.0),)))
    parked = TrajectoryParked("trajectory-train-0-0-0-e0-demo", 0, ROLLOUT, 0, "g")
    first, second = with_plan.handle(parked), without.handle(parked)
    assert isinstance(first[0], SetPriority)
    assert first[0] == second[0]
