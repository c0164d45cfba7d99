"""The plan as values that convert to text and JSON: layout, predicted seconds, bounds, alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from libra.planner.engine_packing import NodeGroup


@dataclass(frozen=True, slots=True)
class Bucket:
    """The engines of one TP degree, and the trajectories of [``from_tokens``, ``to_tokens``) generated tokens assigned to them.

    ``concurrency`` trajectories should generate at once on each engine, which is busy for ``load_frac`` of ``rollout_s`` on
    average, and whose KV they fill to ``kv_used_frac``.
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

    ``step_s`` is proven for every split, layout and assignment of whole trajectories, without draining; ``gap_frac`` and
    ``chosen_frac`` are steps over it, less 1: the best found in that model, and this plan's. ``binning_frac`` is the largest error
    of the programs over classes. The others: the longest trajectory alone on its best engine, tools included; all GPU-seconds of
    the rollout spread evenly over its GPUs; training on its pool.
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
    """A split of the GPUs, a layout of the engines, and its predictions."""

    gpu: str
    model: str
    num_gpus: int
    gpus_per_node: int
    eta: int
    num_trajectories: int
    training: Training
    buckets: tuple[Bucket, ...]  # by rising TP degree
    spare_gpus: int  # in neither pool
    needed_gpus: int  # the fewest with an equally short step, without draining
    step_s: float
    low_s: float  # without draining
    high_s: float  # if the shortest trajectories come first
    rollout_s: float
    train_s: float
    update_s: float  # for new weights
    beside_s: float  # of it, beside the next step
    bottleneck: str  # a key of `WHY`
    bounds: Bounds
    idle_frac: Mapping[str, float]  # of all GPU-seconds of a step, by cause; with "busy" they add up to 1
    gpu_hours_per_step: float
    alternatives: tuple[Alternative, ...]  # the three next best, the best first
    nodes: tuple[NodeGroup, ...]
    left_out: Mapping[str, str]  # requested degrees that are not possible, with the reason
    teacher_gpus: int = 0  # its own
    teacher_s: float = 0.0  # for a batch
    teacher_on: str = ""  # where it computes; empty: a worker of its own
    services_gpus: int = 0  # of services that rewards and tools call; 0 where a teacher has theirs
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
        return asdict(self) | {"rollout_gpus": self.rollout_gpus}


WHY = {
    "training": "it takes longer than generating, so that a GPU is worth more there",
    "rollout throughput": "engines are busy nearly all the time; more of them would shorten the step",
    "teacher": "it takes this long to score the batch; a smaller one or distil.wait_s=0 would help, more GPUs would not",
    "services": "they take this long to answer for the batch; smaller models or late rewards would help, more GPUs would not",
    "longest trajectory": "the longest take this long however many GPUs there are; faster engines would help, more would not",
}


def text(plan: Plan, regime: str) -> str:
    """The whole plan on one screen; ``regime`` names the limit of a step and the way to take it."""
    steps = "at the same time" if plan.eta else "one after the other (run.eta=0)"
    training, number = plan.training, sum(bucket.engines for bucket in plan.buckets)
    lines = [
        f"Plan for {plan.model} on {plan.num_gpus} x {plan.gpu}: {plan.num_trajectories} trajectories a step, "
        f"rollout and training {steps}",
        "",
        f"  training {_gpus(training.gpus)}  {'one copy' if training.gpus == 1 else training.layout}, done after "
        f"{_s(plan.train_s)}; fullest GPU {training.memory_bytes / 1e9:.0f} GB, {training.headroom_bytes / 1e9:.0f} GB free",
        f"  rollout  {_gpus(plan.rollout_gpus)}  {number} engine{'s' * (number > 1)}, done after {_s(plan.rollout_s)}",
        *(_bucket_line(bucket, len(plan.buckets) == 1) for bucket in plan.buckets),
    ]
    if plan.teacher_s:
        lines.append(f"  teacher  {_gpus(plan.teacher_gpus)}  {teacher_words(plan)}")
    if plan.services_on:
        lines.append(
            f"  services {_gpus(plan.services_gpus)}  answer for the batch in {_s(plan.services_s)}, while others are generated; "
            f"{plan.services_on}"
        )
    if plan.spare_gpus:
        lines.append(f"  neither  {_gpus(plan.spare_gpus)}  no pool would be faster with them")
    lines += [
        f"  nodes    {'; '.join(map(_node_words, plan.nodes))}",
        "",
        f"  one step    {_s(plan.step_s)}, {_update(plan)}; {plan.gpu_hours_per_step:.2g} GPU-hours",
        f"              {_s(plan.low_s)} if engines never drained, {_s(plan.high_s)} if the shortest trajectories come first",
        f"  bottleneck  {plan.bottleneck}: {WHY[plan.bottleneck]}",
        f"  regime      {regime}",
        "  GPU time    "
        + ", ".join(f"{100 * share:.0f} % {cause}" for cause, share in plan.idle_frac.items() if share >= 0.005),
    ]
    if plan.needed_gpus < plan.num_gpus - plan.spare_gpus:
        lines.append(f"  fewer GPUs  {plan.needed_gpus} would do, were there no draining; the others shorten it")
    lines += ["", "No plan is faster than", *_bound_lines(plan.bounds)]
    if plan.alternatives:
        lines += ["", "Next best, and why not", *map(alternative_line, plan.alternatives)]
    if plan.left_out:
        lines += ["", "Left out", *(f"  {name}: {reason}" for name, reason in plan.left_out.items())]
    return "\n".join(lines)


def teacher_words(plan: Plan) -> str:
    """The teacher of a plan: its seconds, its place, and the assumption about it."""
    words = f"scores the batch in {_s(plan.teacher_s)}, while others are generated"
    return f"{words}; {plan.teacher_on}" if plan.teacher_on else words


def _update(plan: Plan) -> str:
    if not plan.beside_s:
        return f"of which {_s(plan.update_s)} for new weights"
    rest_s = plan.update_s - plan.beside_s
    more = f", and {_s(rest_s)} before engines go on" if rest_s > 0.0 else ""
    return f"new weights are published beside the next one in {_s(plan.beside_s)}{more}"


def _gpus(number: int) -> str:
    return f"{number:>6} GPU{'s' if number != 1 else ' '}"


def _bucket_line(bucket: Bucket, alone: bool) -> str:
    tokens = "of any length" if alone else f"of {bucket.from_tokens:,.0f} tokens and more"
    if bucket.to_tokens is not None:
        tokens = f"of {bucket.from_tokens:,.0f} to {bucket.to_tokens:,.0f} tokens"
    return (
        f"    {bucket.engines:>5} x TP{bucket.tp:<2}        {bucket.num_trajectories} trajectories {tokens}, up to "
        f"{bucket.concurrency} at once per engine; {100 * bucket.load_frac:.0f} % of its throughput used, KV memory "
        f"{100 * bucket.kv_used_frac:.0f} % full"
    )


def _node_words(group: NodeGroup) -> str:
    parts = [f"{group.train_gpus} training"] if group.train_gpus else []
    parts += [f"{number} x TP{tp}" for tp, number in group.engines.items()]
    parts += [f"{group.free_gpus} free"] if group.free_gpus else []
    return f"{group.num_nodes} with {' + '.join(parts)}"


def _bound_lines(bounds: Bounds) -> list[str]:
    gap = "as fast" if bounds.gap_frac < 5e-6 else f"{100 * bounds.gap_frac:.3f} % above"
    return [
        f"  {_s(bounds.longest_s):>9}  the longest trajectory alone on its best engine, tools included",
        f"  {_s(bounds.throughput_s):>9}  all generating, evenly over the rollout's GPUs",
        f"  {_s(bounds.training_s):>9}  training on its GPUs",
        f"  {_s(bounds.step_s):>9}  any split and any engines: proven for whole trajectories, were there no draining; the best "
        f"found is {gap}",
    ]


def alternative_line(other: Alternative) -> str:
    """One alternative: what it is, what it takes, and why it lost."""
    engines = " + ".join(f"{number} x TP{tp}" for tp, number in other.engines.items())
    layout = f"{other.train_gpus} for training, {engines}"
    named = layout if other.name.endswith("for training") else f"{other.name}: {layout}"
    percent = round(100 * other.slower_frac, 1)
    pace = f"{abs(percent):g} % {'slower' if percent > 0 else 'faster'}" if percent else "as fast"
    return f"  {_s(other.step_s):>9}  {pace}: {named}; {other.reason}"


def _s(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if seconds >= 0.995 or seconds == 0 else f"{1e3 * seconds:.3g} ms"
