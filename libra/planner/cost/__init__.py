"""Seconds and bytes of trajectories and training steps. Pure.

::

    engine = engine_seconds("A800-80G", "Qwen3-14B", tp=2)          # libra.hardware
    cost = rollout_cost(TrajectoryTotals.of(prompt_tokens, generated_tokens, ...), engine)
    cost.engine_s        # (n,) engine-seconds of each trajectory: adds up
    cost.alone_s         # (n,) critical path of each: a lower bound
    step = training_cost(load_gpu("A800-80G"), load_shape("Qwen3-14B"), lengths, num_gpus=16, layout=Layout())
    step.step_s, step.fits, step.headroom_bytes
"""

from libra.planner.cost.rollout_cost import MAX_SEQUENCES, RolloutCost, TrajectoryTotals, rollout_cost
from libra.planner.cost.training_cost import TrainingCost, training_cost, training_table
from libra.planner.cost.training_memory import Layout, MicroBatchSize, fullest_moment, step_bytes

__all__ = [
    "MAX_SEQUENCES",
    "Layout",
    "MicroBatchSize",
    "RolloutCost",
    "TrainingCost",
    "TrajectoryTotals",
    "fullest_moment",
    "rollout_cost",
    "step_bytes",
    "training_cost",
    "training_table",
]
