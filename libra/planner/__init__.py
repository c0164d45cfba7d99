"""The global resource planner: what rollout and training cost, and how to split GPUs between them. Pure.

::

    snapshot = Snapshot(load_gpu("A800-80G"), load_shape("Qwen3-14B"), num_gpus=64, workload=Workload.of(...))
    print(text(plan(snapshot)))                      # `libra plan`
    found = search(pose(snapshot).problem)           # only the search: split, engines, proven bound
    loop = PlanLoop(snapshot, deployed)              # in virtual time: after each iteration learn, plan again, weigh
"""

from libra.planner.explain import text
from libra.planner.loop import PlanLoop, Realised
from libra.planner.making import compare, plan
from libra.planner.plan import Plan
from libra.planner.problem import EngineKind, Problem
from libra.planner.search import Found, Planner, search
from libra.planner.snapshot import Corrections, Snapshot, pose

__all__ = [
    "Corrections",
    "EngineKind",
    "Found",
    "Plan",
    "PlanLoop",
    "Planner",
    "Problem",
    "Realised",
    "Snapshot",
    "compare",
    "plan",
    "pose",
    "search",
    "text",
]
