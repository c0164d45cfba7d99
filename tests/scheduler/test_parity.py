"""The live plugin and the simulator are one policy: on the same workload they give the same slots to the same trajectories, in
the same order, and are done in the same (virtual) second."""

import asyncio
import itertools

import emulated_run
import pytest
from synthetic_workload import synthetic

from libra.facts import from_dict
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.policy.log_replay import replay
from libra.sim.simulation_options import SimulationOptions, fleet
from libra.sim.simulator import Simulator
from libra.sim.workload import Workload
from libra.user_orderings import ordering_of

TABLES = {tp: EngineTables(engine_seconds("A800-80G", "Qwen3-14B", tp)) for tp in (1, 2, 4)}
LAYOUTS = {"one_kind": {2: 3}, "three_kinds": {1: 4, 2: 2, 4: 2}}
PAPER = "benchmarks.orderings:Paper"
OTHERS = [pytest.param(*each, marks=pytest.mark.live) for each in (("mlfq", "three_kinds"), (PAPER, "one_kind"))]


def in_live_order(workload, directory):
    """The workload in the order in which the live scheduler first saw its trajectories: Dask's, and none of ours."""
    events = emulated_run.plugin_events(directory)
    seen = [e["key"] for e in events if e["name"] == "trajectory_parked" and not e["quanta"]]
    by_key = {workload.key(plan): plan for plan in workload.trajectories}
    assert sorted(seen) == sorted(by_key)
    return Workload(workload.name, tuple(by_key[key] for key in seen))


def without_ties(workload):
    """Every tool a little slower than the one before: what happens in the same instant has no order that could be compared."""
    count = itertools.count(1)
    plans = [
        plan._replace(turns=tuple(turn._replace(tool_s=turn.tool_s + 1e-5 * next(count)) for turn in plan.turns))
        for plan in workload.trajectories
    ]
    return Workload(workload.name, tuple(plans))


@pytest.mark.parametrize(("name", "layout"), [("cmlfq", "three_kinds"), *OTHERS])
def test_live_dispatch_is_the_simulators(name, layout, tmp_path):
    workload = without_ties(synthetic(24, turns=4, seed=3, group_size=6, name="parity"))
    specs = fleet(LAYOUTS[layout], TABLES, dict.fromkeys(TABLES, 4))
    policy = {"name": name, "objective": "makespan", "patience": 4}
    live, live_s = asyncio.run(emulated_run.emulate(workload, specs, policy, tmp_path, tool_slots=6))

    work, options = in_live_order(workload, tmp_path), SimulationOptions(tool_slots=6)
    outcome = Simulator(work, specs, ordering_of(**policy), options=options).run()
    simulated = [(str(d.phase), d.key, d.worker) for d in outcome.dispatched]
    assert len(simulated) == sum(2 * len(plan.turns) - 1 for plan in workload.trajectories)
    at = next((i for i, (a, b) in enumerate(zip(live, simulated, strict=True)) if a != b), None)
    assert at is None, f"dispatch {at} of {len(live)}: live {live[at]}, simulated {simulated[at]}"
    assert live_s == pytest.approx(outcome.makespan_s, rel=1e-9)

    lines = ((i, from_dict(event).fact) for i, event in enumerate(emulated_run.plugin_events(tmp_path), 1))
    assert [told.difference for told in replay(lines, ordering_of) if told.difference] == []
