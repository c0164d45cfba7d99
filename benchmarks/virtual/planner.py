"""The planner's time, and the proven gap of its plans to the optimum.

Qwen3-14B on A800 nodes of eight, batches of 256 and 4,096 agent trajectories drawn with replacement
from the mini-SWE-agent trace and cut at 40,960 tokens (the limit of the Libra paper), staleness
bound 1. For each number of GPUs and of requests:

``wall_s_<gpus>_<requests>``
    Median of three, from trajectories to costs, layout and proof, without caches between them.
``gap_<gpus>_<requests>``
    Step found over proven lower bound, less 1. The bound holds for every split, every layout and
    every assignment of whole trajectories, without binning.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import cvxpy  # noqa: F401  (imported before anything is timed)

from benchmarks.report import Figure, command_parser, emit
from libra.hardware import load_gpu, load_shape
from libra.planner.agent_turns import read_agent_turns
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.cost.rollout_cost import TRACE_COLUMNS, totals_of_trace
from libra.planner.planning_problem import Problem
from libra.planner.search import search
from libra.planner.snapshot import PlanningSnapshot, formulate

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 10_000)
REQUESTS = (256, 4096)
MAX_CONTEXT_TOKENS = 40_960
TOOL_S = 0.5
"""Assumed seconds of a tool call: the trace has none."""
GOAL_GAP = 1e-3
TRACE = "agent_turns/mini_swe_gemini3.csv"


def goal_s(num_gpus: int) -> float | None:
    return {1024: 0.3, 10_000: 2.0}.get(num_gpus)


def posed(workload: TrajectoryTotals, num_gpus: int) -> Problem:
    snapshot = PlanningSnapshot(
        load_gpu("A800-80G"), load_shape("Qwen3-14B"), num_gpus, workload, training=Layout(), eta=1
    )
    return formulate(snapshot).problem


def measure(workload: TrajectoryTotals, num_gpus: int, repeats: int) -> dict[str, Figure]:
    name = f"{num_gpus}_{len(workload)}"
    walls = []
    for _ in range(repeats):
        started = time.perf_counter()
        problem = posed(workload, num_gpus)
        found = search(problem)
        walls.append(time.perf_counter() - started)
    print(
        f"{num_gpus:6d} GPUs, {len(workload)} requests: {found.train_gpus} train; step {found.step_s:.1f} s, proven >= "
        f"{found.lower_s:.1f}; {found.num_programs} programs, {found.num_splits} splits",
        flush=True,
    )
    return {
        f"wall_s_{name}": Figure(statistics.median(walls), "s", "lower", goal_s(num_gpus)),
        f"gap_{name}": Figure(found.gap_frac, "fraction", "lower", GOAL_GAP),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("planner", __doc__, data=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--repeats", type=int, default=3, help="searches of which the median is taken")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of trajectories")
    options = parser.parse_args(arguments)
    trace = totals_of_trace(read_agent_turns(options.data / TRACE, TRACE_COLUMNS, "--data"), TOOL_S)
    search(
        posed(trace.resampled(8, options.seed, MAX_CONTEXT_TOKENS), 16)
    )  # solver and tables are loaded once, untimed
    figures: dict[str, Figure] = {}
    for requests in options.requests:
        workload = trace.resampled(requests, options.seed, MAX_CONTEXT_TOKENS)
        for num_gpus in options.gpus:
            figures |= measure(workload, num_gpus, options.repeats)
    emit("planner", figures, arguments=arguments, as_json=options.json)
