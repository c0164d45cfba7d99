"""The global resource planner: what rollout and training cost, and how to split GPUs between them. Pure.

::

    snapshot = Snapshot(load_gpu("A800-80G"), load_shape("Qwen3-14B"), num_gpus=64, workload=Workload.of(...))
    print(text(plan(snapshot)))                      # `libra plan`
    found = search(pose(snapshot).problem)           # only the search: split, engines, proven bound
    loop = PlanLoop(snapshot, deployed)              # in virtual time: after each iteration learn, plan again, weigh
"""

from libra.planner.build_plan import compare, plan
from libra.planner.explain import text
from libra.planner.plan import Plan
from libra.planner.plan_loop import PlanLoop, RealisedStep
from libra.planner.planning_problem import EngineClass, Problem
from libra.planner.search import Found, Planner, search
from libra.planner.snapshot import Corrections, PlanningSnapshot, formulate

__all__ = [
    "Corrections",
    "EngineClass",
    "Found",
    "Plan",
    "PlanLoop",
    "Planner",
    "PlanningSnapshot",
    "Problem",
    "RealisedStep",
    "compare",
    "formulate",
    "plan",
    "search",
    "text",
]
