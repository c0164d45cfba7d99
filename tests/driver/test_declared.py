"""Real engines of two speeds on real workers: what the policy is told is what they declared, and nobody declared it by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.events import from_dict
from libra.hardware.virtual_engine import EngineTables
from libra.policy import joined_of, make_ordering, off_by_frac
from libra.policy.log_replay import replay
from libra.policy.move_review import moves
from libra.scheduler.worker_registry import UPDATE_FRAC
from libra.sim import SimulationOptions, Simulator
from libra.sim.engines import EngineSpec
from libra.sim.from_run import workload_of_run
from libra.store.event_log import EventReader
from libra.types import EngineCapacity, StepSeconds

TRACES = Path(__file__).parents[2] / "benchmarks" / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
FAST_S, SLOW_S = 0.01, 0.05
SLOTS, MAX_CONTEXT_TOKENS = 4, 1024
KV_GIB = 0.0007
"""Less KV than all slots could fill: what an engine declares is its budget, not a product of settings."""


def config(model: Path, directory: Path, policy: str, **cluster: Any) -> RunConfig:
    args = {
        "path": str(TRACES),
        "groups": 4,
        "group_size": 4,
        "tokens_frac": 0.05,
        "payload_frac": 0.02,
        "tool_frac": 0.0,
    }
    return config_from_dict(
        {
            "run": {"name": f"declared_{policy}", "dir": str(directory), "iterations": 2},
            "model": {"path": str(model)},
            "environment": {"name": "libra.testing:TraceTurns", "args": args},
            "rollout": {
                "slots": SLOTS, "max_context_tokens": MAX_CONTEXT_TOKENS, "max_turns": 64, "ignore_eos": True,
                "max_new_tokens": 256, "kv_cache_gib": KV_GIB,
            },
            "trainer": {"prompts": 4, "group_size": 4, "lr": 0.0, "micro_batch_tokens": 4096, "max_row_tokens": 1024},
            "policy": {"name": policy},
            "evaluation": {"prompts": 0},
            "checkpoint": {"every": 0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {"dashboard_port": 0, "threads": 1} | cluster,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def log(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, Any]]]:
    """Directory and event log of a run on a fast and a slow engine, made once."""
    directory = tmp_path_factory.mktemp("runs")
    engines = [{"threads": 1, "min_pass_s": FAST_S}, {"threads": 1, "min_pass_s": SLOW_S}]
    with (
        local_cluster(config(random_model, directory, "cmlfq", engines=engines)) as cluster,
        Client(cluster) as client,
        Session(config(random_model, directory, "cmlfq"), client=client) as session,
    ):
        assert [values["iteration"] for values in session.iterations()] == [0, 1]
    return session.directory, [(n, from_dict(e)) for n, e in EventReader(session.directory / "events.jsonl")]


def declared(log: list[tuple[int, Any]], worker: str) -> list[EngineCapacity]:
    found = [event for _, event in log if event.name == "engine_declared" and event.worker == worker]
    return [
        EngineCapacity.from_declaration({name: getattr(event, name) for name in event.__struct_fields__})
        for event in found
    ]


@pytest.mark.timeout(600)
def test_engines_declare_their_budget_and_the_seconds_of_their_own_passes(log: Any) -> None:
    _, lines = log
    for worker, pass_s in (("rollout-0", FAST_S), ("rollout-1", SLOW_S)):
        first, *_, last = declared(lines, worker)
        assert first.steps is None, "at its start it has measured nothing"
        assert last.kv_tokens == int(KV_GIB * 2**30) // last.kv_token_bytes < SLOTS * MAX_CONTEXT_TOKENS
        assert (last.slots, last.tp, last.max_context_tokens) == (SLOTS, 1, MAX_CONTEXT_TOKENS)
        assert last.kv_token_bytes == 2 * 2 * 1 * 16 * 4  # keys and values, layers, heads, head size, float32
        assert last.steps is not None
        assert last.steps.step_s(SLOTS, SLOTS * 100) >= 0.9 * pass_s, "no pass takes less"


@pytest.mark.timeout(600)
def test_the_policy_is_told_what_was_declared(log: Any) -> None:
    _, lines = log
    last: dict[str, EngineCapacity] = {}
    told: dict[str, Any] = {}
    for _, event in lines:
        if event.name == "engine_declared":
            last[event.worker] = declared([(0, event)], event.worker)[0]
        elif event.name == "worker_capacity" and event.worker in last:
            told[event.worker] = event
            expected = joined_of(event.worker, event.bucket, last[event.worker])
            assert (event.kv_tokens, event.rollout_slots) == (expected.kv_tokens, SLOTS)
            for name in ("alone_s_per_token", "full_s_per_token", "prefill_s_per_token", "beside_s_per_token"):
                assert getattr(event, name) == getattr(expected, name)
    assert told.keys() == {"rollout-0", "rollout-1"}
    assert all(event.kv_tokens > 0 and event.alone_s_per_token > 0 for event in told.values())
    for worker, event in told.items():  # and what was told last is near what was declared last
        steps = StepSeconds(
            event.alone_s_per_token - event.beside_s_per_token, event.beside_s_per_token, 0.0, 0.0, 1, 0.0
        )
        now = last[worker].steps
        assert now is not None
        assert steps.step_s(1, 0) == pytest.approx(now.step_s(1, 0), rel=2 * UPDATE_FRAC)
    assert off_by_frac(last["rollout-0"], last["rollout-1"]) > 0.0


@pytest.mark.timeout(600)
def test_every_decision_follows_from_the_log_and_moves_are_explained_by_it(log: Any) -> None:
    _, lines = log
    assert [told.difference for told in replay(lines) if told.difference] == []
    found, dispatched = moves(lines)
    assert dispatched == sum(e.name == "quantum_dispatched" and e.phase == "ROLLOUT" for _, e in lines)
    assert all(move.reason.startswith("move: ") for move in found)


@pytest.mark.timeout(600)
def test_the_simulator_told_the_same_gives_the_fast_engine_the_work_that_it_got_live(log: Any) -> None:
    """Where timing does not differ: two engines of five times the speed of each other, the whole second iteration."""
    directory, lines = log
    live: Counter[str] = Counter()
    homes: dict[str, str] = {}
    for _, event in lines:
        if event.name == "quantum_dispatched" and event.phase == "ROLLOUT" and "-train-1-" in event.key:
            homes.setdefault(event.key, event.worker)
            live[event.worker] += 1
    workload = workload_of_run(directory)
    specs = []
    for worker in ("rollout-0", "rollout-1"):
        capacity = declared(lines, worker)[-1]
        specs.append(EngineSpec(worker, 1, SLOTS, EngineTables(_Measured(capacity))))
    outcome = Simulator(workload, specs, make_ordering("cmlfq"), options=SimulationOptions(tool_slots=64)).run()
    simulated = Counter(d.worker for d in outcome.dispatched if str(d.phase) == "ROLLOUT" and "-train-1-" in d.key)
    assert sum(live.values()) == sum(simulated.values())
    share, expected = live["rollout-0"] / sum(live.values()), simulated["rollout-0"] / sum(simulated.values())
    assert expected > 0.5 and share > 0.5
    assert share == pytest.approx(expected, abs=0.3)


class _Measured:
    """`EngineSeconds` of a declared capacity."""

    def __init__(self, capacity: EngineCapacity) -> None:
        assert capacity.steps is not None
        self.tp, self.kv_capacity_tokens, self._steps = capacity.tp, capacity.kv_tokens, capacity.steps

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return self._steps.step_s(num_sequences, context_tokens)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        return self._steps.prefill_token_s * new_tokens
