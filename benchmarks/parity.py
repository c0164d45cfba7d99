"""Simulator against live plugin: the same trajectories under the same policy in both.

``makespan_virtual_<policy>``: live over simulated makespan with engines and tools in virtual time on both sides. Decisions
differ only if two requests end in one step: the simulator sees both before it dispatches, Dask sees one after the other.
``makespan_scaled_<policy>``: the same with emulated engines in scaled wall time, which includes messages, event loops and
timers of Dask. The share of equal dispatches in equal order is printed; without ties it is 1
(``tests/scheduler/test_parity.py``). Workers and scheduler are in one process; engines are emulated
(`benchmarks.emulated_run`). Trajectories are drawn from the traces of ``--data``.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from benchmarks.emulated_run import emulate, plugin_events
from benchmarks.report import Figure, command_parser, emit
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.policy import make_ordering
from libra.sim import EngineSpec, SimulationOptions, Simulator, Workload, draw, fleet
from libra.sim.workload import load_traces

LAYOUT = {1: 4, 2: 3, 4: 2, 8: 1}
TOOL_SLOTS = 64


def in_order_of(workload: Workload, directory: Path) -> Workload:
    """The workload in the order in which the live scheduler first saw its trajectories."""
    events = plugin_events(directory)
    seen = [event["key"] for event in events if event["name"] == "trajectory_parked" and not event["quanta"]]
    by_key = {workload.key(plan): plan for plan in workload.trajectories}
    return Workload(workload.name, tuple(by_key[key] for key in seen))


def without_ties(workload: Workload) -> Workload:
    """Every tool a little slower than the one before, every first turn longer by its number, so that no two events coincide."""
    count, plans = 0, []
    for number, plan in enumerate(workload.trajectories):
        turns = []
        for index, turn in enumerate(plan.turns):
            count += 1
            longer = number if index == 0 else 0
            turns.append(turn._replace(tool_s=turn.tool_s + 1e-5 * count, new_tokens=turn.new_tokens + longer))
        plans.append(plan._replace(turns=tuple(turns)))
    return Workload(workload.name, tuple(plans))


def both(workload: Workload, specs: tuple[EngineSpec, ...], name: str, speedup: float | None) -> tuple[float, float]:
    """Share of equal dispatches in equal order, and live over simulated makespan."""
    policy = {"name": name, "objective": "makespan", "patience": 16}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        live, live_s = asyncio.run(emulate(workload, specs, policy, directory, tool_slots=TOOL_SLOTS, speedup=speedup))
        ordered = in_order_of(workload, directory)
    around = SimulationOptions(tool_slots=TOOL_SLOTS)
    outcome = Simulator(ordered, specs, make_ordering(**policy), options=around).run()
    simulated = [(str(d.phase), d.key, d.worker) for d in outcome.dispatched]
    agree = sum(a == b for a, b in zip(live, simulated, strict=False)) / max(len(live), len(simulated))
    return agree, live_s / outcome.makespan_s


def main() -> None:
    """Run it."""
    parser = command_parser("parity", __doc__, data=True)
    parser.add_argument("--trace", default="mini_swe_gemini3", help="which file of it")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--policies", nargs="+", default=["fifo", "cmlfq"])
    parser.add_argument("--speedup", type=float, default=25.0, help="emulated seconds per second")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    tables = {tp: EngineTables(engine_seconds("A800-80G", "Qwen3-14B", tp)) for tp in LAYOUT}
    specs = fleet(LAYOUT, tables, dict.fromkeys(LAYOUT, 8))
    traces = load_traces(arguments.data / "agent_turns" / f"{arguments.trace}.csv", seed=0)
    figures: dict[str, Figure] = {}
    for name in arguments.policies:
        scaled, virtual = [], []
        for seed in range(arguments.runs):
            workload = without_ties(draw(traces, num_groups=arguments.groups, group_size=8, seed=seed, name="parity"))
            agree, exact = both(workload, specs, name, None)
            _, ratio = both(workload, specs, name, arguments.speedup)
            print(f"{name}, seed {seed}: {agree:.1%} of dispatches in order, makespan {exact:.6f}; scaled: {ratio:.3f}")
            virtual.append(exact)
            scaled.append(ratio)
        for kind, ratios in (("virtual", virtual), ("scaled", scaled)):
            worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
            print(f"{name}, {kind}: {', '.join(f'{ratio:.4f}' for ratio in ratios)}; furthest from 1: {worst:.4f}")
            figures[f"makespan_{kind}_{name}"] = Figure(statistics.median(ratios), "live over simulated", "lower", 1.05)
    emit("parity", figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
