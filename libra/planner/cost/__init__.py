"""What trajectories and training steps cost, in seconds and bytes; pure, for the planner and for whoever asks what if.

::

    engine = engine_seconds("A800-80G", "Qwen3-14B", tp=2)          # libra.hardware
    cost = rollout_cost(Workload.of(prompt_tokens, generated_tokens, ...), engine)
    cost.engine_s        # (n,) engine-seconds of each trajectory: adds up
    cost.alone_s         # (n,) critical path of each: a lower bound
    step = training_cost(load_gpu("A800-80G"), load_shape("Qwen3-14B"), lengths, num_gpus=16, layout=Layout())
    step.step_s, step.fits, step.headroom_bytes
"""

from libra.planner.cost.generation_rate import Generation, generation
from libra.planner.cost.rollout_cost import MAX_SEQUENCES, ManySeconds, RolloutCost, rollout_cost, rollout_costs
from libra.planner.cost.training_cost import Layout, TrainingCost, training_cost, training_table
from libra.planner.cost.training_memory import MemoryOptions, MicroBatchSize, fullest_moment, step_bytes
from libra.planner.cost.workload import Workload

__all__ = [
    "MAX_SEQUENCES",
    "Generation",
    "Layout",
    "ManySeconds",
    "MemoryOptions",
    "MicroBatchSize",
    "RolloutCost",
    "TrainingCost",
    "Workload",
    "fullest_moment",
    "generation",
    "rollout_cost",
    "rollout_costs",
    "step_bytes",
    "training_cost",
    "training_table",
]
