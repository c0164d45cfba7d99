"""The plan as values, text and JSON: layout, predicted seconds, bounds, alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from libra.planner.engine_packing import NodeGroup


@dataclass(frozen=True, slots=True)
class Bucket:
    """Engines of one TP degree, and the trajectories assigned to them."""

    tp: int
    engines: int
    concurrency: int  # concurrent trajectories per engine
    from_tokens: float  # generated tokens: at least this, below ``to_tokens``
    to_tokens: float | None
    num_trajectories: int
    load_frac: float  # mean share of ``rollout_s`` in which an engine is busy
    rollout_s: float
    kv_capacity_tokens: int
    kv_used_frac: float

    @property
    def gpus(self) -> int:
        """Total GPUs of the bucket."""
        return self.tp * self.engines


@dataclass(frozen=True, slots=True)
class Training:
    """The training pool: seconds per step, and memory of the fullest GPU."""

    gpus: int
    layout: str
    step_s: float
    communication_s: float
    memory_bytes: float
    headroom_bytes: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the seconds of any plan."""

    step_s: float  # proven for any split, layout and assignment of whole trajectories; no draining
    gap_frac: float  # best step of the search over the bound, less 1
    chosen_frac: float  # this plan's step over the bound, less 1; its draining may be better
    binning_frac: float  # largest error of the programs over classes
    longest_s: float  # the longest trajectory alone on its best engine, tools included
    throughput_s: float  # all GPU-seconds of rollout, spread evenly over its GPUs
    training_s: float  # optimizer step on its pool


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative, and why it lost; ``slower_frac`` is its step over the plan's, less 1."""

    name: str
    train_gpus: int
    engines: Mapping[int, int]
    step_s: float
    slower_frac: float
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """GPU split, engine layout, and predictions."""

    gpu: str
    model: str
    num_gpus: int
    gpus_per_node: int
    eta: int
    num_trajectories: int
    training: Training
    buckets: tuple[Bucket, ...]  # by rising TP degree
    spare_gpus: int  # in neither training nor rollout
    needed_gpus: int  # fewest GPUs with an equally short step, without draining
    step_s: float
    low_s: float  # without draining
    high_s: float  # if the shortest trajectories come first
    rollout_s: float
    train_s: float
    update_s: float  # weight update
    beside_s: float  # part of ``update_s`` that overlaps the next step
    bottleneck: str  # a key of `WHY`
    bounds: Bounds
    idle_frac: Mapping[str, float]  # share of a step's GPU-seconds by cause; they add up to 1 with "busy"
    gpu_hours_per_step: float
    alternatives: tuple[Alternative, ...]  # the three best after the plan, best first
    nodes: tuple[NodeGroup, ...]
    left_out: Mapping[str, str]  # impossible degrees of the request, with reasons
    teacher_gpus: int = 0  # GPUs of its own
    teacher_s: float = 0.0  # per batch
    teacher_on: str = ""  # where it computes; empty: on its own worker
    services_gpus: int = 0  # of services for rewards and tools; 0 if a teacher has the same GPU
    services_s: float = 0.0
    services_on: str = ""

    @property
    def engines(self) -> dict[int, int]:
        """Number of engines by TP degree."""
        return {bucket.tp: bucket.engines for bucket in self.buckets}

    @property
    def rollout_gpus(self) -> int:
        """Total GPUs of all engines."""
        return sum(bucket.gpus for bucket in self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, numbers and strings, by field name."""
        return asdict(self) | {"rollout_gpus": self.rollout_gpus}


WHY = {
    "training": "it takes longer than generating, so that a GPU is worth more there",
    "rollout throughput": "engines are busy nearly all the time; more of them would shorten the step",
    "teacher": "it takes this long to score the batch; a smaller one or distil.wait_s=0 would help, more GPUs would not",
    "services": "they take this long to answer for the batch; smaller models or late rewards would help, more GPUs would not",
    "longest trajectory": "the longest take this long however many GPUs there are; faster engines would help, more would not",
}


def text(plan: Plan, regime: str) -> str:
    """The plan on one screen; ``regime`` names the bottleneck and how to relieve it."""
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
    """Seconds, place and assumptions of a plan's teacher."""
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
    """One line per alternative: name, layout, step, and why it was not chosen."""
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
