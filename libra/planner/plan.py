"""The plan as values that convert to text and JSON: layout, predicted seconds, bounds, alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from libra.planner.node_placement import NodeGroup


@dataclass(frozen=True, slots=True)
class Bucket:
    """The engines of one TP degree, and the trajectories assigned to them.

    Attributes
    ----------
    tp, engines : int
    concurrency : int
        Trajectories that should generate at once on each.
    from_tokens, to_tokens : float
        Generated tokens of the trajectories assigned to it, in [from, to), so that every bucket has its share of the load.
        None: the last bucket has no end.
    num_trajectories : int
    load_frac : float
        Share of the rollout's seconds for which an engine is busy, on average.
    rollout_s : float
        Seconds until its last engine finishes.
    kv_capacity_tokens : int
        Of each engine.
    kv_used_frac : float
        Share of it that trajectories at this concurrency hold on average.
    """

    tp: int
    engines: int
    concurrency: int
    from_tokens: float
    to_tokens: float | None
    num_trajectories: int
    load_frac: float
    rollout_s: float
    kv_capacity_tokens: int
    kv_used_frac: float

    @property
    def gpus(self) -> int:
        """GPUs of the bucket."""
        return self.tp * self.engines


@dataclass(frozen=True, slots=True)
class Training:
    """The training pool: seconds of a step and its parts, and memory of the fullest GPU."""

    gpus: int
    layout: str
    step_s: float
    communication_s: float
    memory_bytes: float
    headroom_bytes: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds that no plan can beat, in seconds.

    Attributes
    ----------
    step_s : float
        Proven for every split, every layout and every assignment of whole trajectories, of the model without draining.
    gap_frac : float
        The best step found in that model over it, less 1.
    chosen_frac : float
        This plan's step in that model over it, less 1: above the gap if another layout has a shorter step there but drains
        more slowly.
    binning_frac : float
        Largest error of the programs over classes of trajectories; not part of the gap.
    longest_s : float
        The longest trajectory alone on its best engine, tools included: no number of GPUs helps.
    throughput_s : float
        All GPU-seconds of the rollout, evenly over its GPUs.
    training_s : float
        Training on its pool.
    """

    step_s: float
    gap_frac: float
    chosen_frac: float
    binning_frac: float
    longest_s: float
    throughput_s: float
    training_s: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative and why it lost: ``slower_frac`` is its step over the plan's, less 1."""

    name: str
    train_gpus: int
    engines: Mapping[int, int]
    step_s: float
    slower_frac: float
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of the GPUs, a layout of the engines, and what follows from them.

    Attributes
    ----------
    gpu, model : str
    num_gpus, gpus_per_node, eta, num_trajectories : int
    training : Training
    buckets : tuple of Bucket
        By rising TP degree.
    spare_gpus : int
        GPUs in neither pool: they would not shorten the step.
    needed_gpus : int
        The fewest GPUs with an equally short step in the model without draining.
    step_s, low_s, high_s : float
        Predicted step; low without draining, high if the shortest trajectories come first.
    rollout_s, train_s, update_s : float
        Predicted parts of it.
    beside_s : float
        Of ``update_s``, the seconds that pass beside the next step.
    bottleneck : str
        "training", "rollout throughput", "longest trajectory", "teacher" or "services".
    bounds : Bounds
    idle_frac : mapping of cause to share of all GPU-seconds of a step
        With "busy" they add up to 1.
    gpu_hours_per_step : float
    alternatives : tuple of Alternative
        The three next best, the best first.
    nodes : tuple of NodeGroup
        The content of the nodes, grouped by equal content.
    left_out : mapping of a requested degree that is not possible to the reason
    teacher_gpus, teacher_s
        The GPU of a teacher, and its seconds for a batch; 0: it takes none from engines and training, there is no teacher.
    teacher_on : str
        Where a teacher that is a service computes, and what is assumed of that, in words; empty for others.
    services_gpus, services_s, services_on
        The same of services with models that rewards and tools ask; 0 GPUs where a teacher has theirs.
    """

    gpu: str
    model: str
    num_gpus: int
    gpus_per_node: int
    eta: int
    num_trajectories: int
    training: Training
    buckets: tuple[Bucket, ...]
    spare_gpus: int
    needed_gpus: int
    step_s: float
    low_s: float
    high_s: float
    rollout_s: float
    train_s: float
    update_s: float
    beside_s: float
    bottleneck: str
    bounds: Bounds
    idle_frac: Mapping[str, float]
    gpu_hours_per_step: float
    alternatives: tuple[Alternative, ...]
    nodes: tuple[NodeGroup, ...]
    left_out: Mapping[str, str]
    teacher_gpus: int = 0
    teacher_s: float = 0.0
    teacher_on: str = ""
    services_gpus: int = 0
    services_s: float = 0.0
    services_on: str = ""

    @property
    def engines(self) -> dict[int, int]:
        """Engines by TP degree."""
        return {bucket.tp: bucket.engines for bucket in self.buckets}

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all engines."""
        return sum(bucket.gpus for bucket in self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, numbers and strings, every field by its name."""
        values = asdict(self)
        values["rollout_gpus"] = self.rollout_gpus
        return values
