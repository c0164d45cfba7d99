"""The global resource planner: what rollout and training cost, and how to split GPUs between them. Pure.

::

    snapshot = PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-14B"), num_gpus=64, workload=TrajectoryTotals.of(...))
    print(text(plan(snapshot)))                      # `libra plan`
    found = search(formulate(snapshot).problem)      # only the search: split, engines, proven bound

During a run, `libra.planner.replan` decides after each iteration from measurements.
"""

from libra.planner.build_plan import compare, plan
from libra.planner.plan import Plan, text
from libra.planner.planning_problem import EngineClass, Problem
from libra.planner.search import Found, Planner, search
from libra.planner.snapshot import PlanningSnapshot, formulate

__all__ = [
    "EngineClass",
    "Found",
    "Plan",
    "Planner",
    "PlanningSnapshot",
    "Problem",
    "compare",
    "formulate",
    "plan",
    "search",
    "text",
]
