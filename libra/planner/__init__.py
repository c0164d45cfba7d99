"""The resource planner: costs of rollout and training, and the split of GPUs between them. Pure.

`libra.planner.build_plan` plans from a `PlanningSnapshot` (`libra plan`); `libra.planner.replan`
decides after each iteration of a run from its measurements.
"""
