"""Conversion between a plan and run settings: training workers, engines, slots and micro-batches.

1. After `with_plan`, a configuration has the plan's degrees, engines per degree, concurrency and
   training workers.
2. A plan is for one model shape and one kind of hardware; `check_planned` refuses any other and
   names both.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from libra.config import RunConfig, config_from_dict
from libra.config.planner import PlannedEngines, PlannedLayout
from libra.errors import PlanError
from libra.hardware import ModelShape
from libra.hardware.shapes import shape_digest
from libra.planner.build_plan import plan as make_plan
from libra.planner.cost import training_table
from libra.planner.plan import Plan, alternative_line, teacher_words
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot

CPU = "cpu"
"""Hardware name without a GPU: each rank counts as one GPU."""
ROUTED = "cmlfq"
"""The policy that uses the plan's length boundaries between degrees."""
LARGER_PAYS_FRAC = 0.02
"""Minimum gain of a larger micro-batch: the cost model's error, as a share of the step."""
SIZES = (1, 2, 4, 8)
"""Tested multiples of the configured micro-batch."""


def planned(snapshot: PlanningSnapshot, floor_tokens: int, *, may_grow: bool = True) -> tuple[Plan, int]:
    """A plan, and the tokens of its micro-batch.

    A micro-batch that does not fit is halved down to ``floor_tokens``, the size of a trajectory and
    a row. With ``may_grow`` (False if memory differs from the datasheet's), a larger one is used if
    it fits and shortens the optimizer step. PlanError if no size fits.
    """
    configured, planner = snapshot.training.micro_batch_tokens, Planner()

    def made(tokens: int) -> Plan:
        return make_plan(replace(snapshot, training=replace(snapshot.training, micro_batch_tokens=tokens)), planner)

    try:
        found, tokens = made(configured), configured
    except PlanError as failed:
        for power in range(1, configured.bit_length()):
            if (tokens := configured >> power) < floor_tokens:
                break
            with suppress(PlanError):
                return made(tokens), tokens
        raise failed from None
    larger = _larger(snapshot, found.training.gpus) if may_grow else tokens
    return (found, tokens) if larger == tokens else (made(larger), larger)


def _larger(snapshot: PlanningSnapshot, train_gpus: int) -> int:
    """The configured micro-batch, or a larger one that fits and shortens the step."""
    layout, tokens = snapshot.training, snapshot.trained_tokens
    sheet = replace(snapshot.gpu, gpus_per_node=snapshot.node_gpus)
    best, least_s = layout.micro_batch_tokens, None
    for size in SIZES:
        tried = replace(layout, micro_batch_tokens=layout.micro_batch_tokens * size)
        cost = training_table(sheet, snapshot.shape, tokens, [train_gpus], tried)[train_gpus]
        if cost.fits and (least_s is None or cost.step_s < least_s * (1 - LARGER_PAYS_FRAC)):
            best, least_s = tried.micro_batch_tokens, cost.step_s
    return best


def layout_of(plan: Plan, shape: ModelShape, micro_batch_tokens: int, gpu: str, rests_on: str) -> PlannedLayout:
    """Settings of a plan for a start on ``gpu`` (or `CPU`); ``rests_on``: source of its seconds."""
    return PlannedLayout(
        model=shape.name,
        model_digest=shape_digest(shape),
        gpu=gpu,
        num_gpus=plan.num_gpus,
        train_gpus=plan.training.gpus,
        engines=tuple(PlannedEngines(tp=b.tp, count=b.engines, concurrency=b.concurrency) for b in plan.buckets),
        boundaries_tokens=tuple(float(bucket.from_tokens) for _, bucket in pairwise(plan.buckets)),
        teacher=f"{plan.teacher_gpus} x, {teacher_words(plan)}" if plan.teacher_s else "",
        micro_batch_tokens=micro_batch_tokens,
        step_s=plan.step_s,
        rests_on=rests_on,
        why=plan.bottleneck,
        lost=tuple(alternative_line(other).strip() for other in plan.alternatives),
    )


def with_plan(config: RunConfig, layout: PlannedLayout) -> RunConfig:
    """``config`` with the settings of ``layout``; ConfigError if they contradict other settings."""
    values = config.model_dump()
    engines = [{"tp": e.tp, "count": e.count, "slots": e.concurrency} for e in layout.engines]
    values["cluster"] |= {"train_workers": layout.train_gpus, "engines": engines, "rollout_workers": 1}
    values["trainer"] |= {"micro_batch_tokens": layout.micro_batch_tokens}
    if config.policy.name == ROUTED:
        values["policy"] |= {"boundaries_tokens": layout.route}
    values["planner"] |= {"layout": "configured", "planned": layout}
    return config_from_dict(values)


def check_planned(layout: PlannedLayout, shape: ModelShape, gpu: str, num_gpus: int) -> None:
    """PlanError if a plan is for another model or other hardware (``num_gpus`` x ``gpu``).

    On `CPU`, any number of ranks is accepted: they share the cores.
    """
    again = "type libra plan CONFIG --write FILE for one that fits, or planner.planned=null to start these settings unplanned"
    if layout.model_digest != shape_digest(shape):
        raise PlanError(
            f"planner.planned: the plan is for {layout.model} (sizes {layout.model_digest[:12]}), model.path is {shape.name} "
            f"(sizes {shape_digest(shape)[:12]}); {again}"
        )
    here = "no GPU" if gpu == CPU else f"{num_gpus} x {gpu}"
    if layout.gpu != gpu or (gpu != CPU and layout.num_gpus > num_gpus):
        raise PlanError(
            f"planner.planned: the plan is for {layout.num_gpus} x {layout.gpu}, this cluster has {here}; {again}"
            + ("" if layout.gpu != gpu else f" (planner.num_gpus={num_gpus})")
        )


def layout_lines(layout: PlannedLayout, policy: str = ROUTED) -> list[str]:
    """Text of a started plan: layout, bottleneck, source of its seconds, and alternatives.

    ``policy`` is the run's `policy.name`; only `ROUTED` uses the boundaries between degrees.
    """
    ranks = "ranks on CPU cores" if layout.gpu == CPU else f"x {layout.gpu}"
    starts = (0.0, *layout.boundaries_tokens)
    many = len(layout.engines) > 1
    engines = "; ".join(
        f"{engine.count} x TP{engine.tp}, {engine.concurrency} at once on each"
        + (f", from {start:,.0f} generated tokens" if many and start else "")
        for engine, start in zip(layout.engines, starts, strict=True)
    )
    return [
        f"layout        planned for {layout.model} on {layout.num_gpus} {ranks}: a step of {layout.step_s:.3g} s, "
        f"bottleneck {layout.why}",
        f"  training    {layout.train_gpus} x, micro-batches of {layout.micro_batch_tokens:,} tokens",
        f"  rollout     {engines}" + (f"; policy.name={policy} ignores lengths" if many and policy != ROUTED else ""),
        *([f"  teacher     {layout.teacher}"] if layout.teacher else []),
        f"  rests on    {layout.rests_on}",
        *(f"  lost        {line}" for line in layout.lost),
    ]
