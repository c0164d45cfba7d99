"""Training systems compared: each is tuned on one seed (training GPUs, TP degree, rule of turning),
and scored on others.

A cell is a set of traces on some GPUs with a load and a staleness bound. `play` simulates one
system in it, `tune` searches the settings of a system by coordinate descent, `lower_bound_s` is
what no system can be faster than without speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.orderings import CompletedCalls, Oracle, Paper
from benchmarks.systems.disciplines import Discipline, Roles
from benchmarks.systems.gpu_seconds import PipelineResult
from benchmarks.systems.training_gpus import PipelineOptions, group_work
from benchmarks.systems.training_run import Pipeline
from benchmarks.virtual.draws import draw_alike
from libra.errors import ConfigError
from libra.hardware import GPU, ModelShape, engine_seconds, load_gpu, load_shape
from libra.hardware.engine_tables import EngineTables, HostPool
from libra.policy import CMLFQ, Ordering, make_ordering
from libra.policy.tail import TurningRule
from libra.sim.simulation_options import fleet, slots_of
from libra.sim.workload import Trace, TrajectoryPlan, Workload
from libra.types import NO_TOOL

DEGREES = (2, 4, 8)
"""TP degrees of engines that are tried; all engines of a system have one."""
NODE = 8
"""Core trainers are whole nodes of so many GPUs, if there are two or more."""
PER_GPU = (4.0, 6.0, 8.0)
"""`TurningRule.trajectories_per_gpu` to try, for each open batch (``eta + 1``)."""
HOST_BYTES_PER_GPU, FETCH_S, FETCH_BYTES_PER_S = 64e9, 0.3, 20e9
"""Host memory for KV, and seconds and bytes per second of a fetch, where KV moves."""
STEPS = {0: (5, 1), 1: (8, 2), 2: (9, 3)}
"""By staleness bound: steps that are simulated, and of those the first ones that are left out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Where systems are compared."""

    traces: tuple[Trace, ...]
    group_size: int
    kinship: float
    groups: int
    gpus: int
    eta: int
    gpu: str = "A800-80G"
    model: str = "Qwen3-14B"
    teacher_token_s: float = 0.0

    def workload(self, seed: int, iterations: int | None = None) -> Workload:
        iterations = iterations or STEPS[self.eta][0] + self.eta + 1
        return draw_alike(
            self.traces, num_groups=self.groups, group_size=self.group_size, seed=seed, iterations=iterations, kinship=self.kinship
        )  # fmt: skip


class Setting(NamedTuple):
    """The tuned values: core training GPUs, degree of engines, `TurningRule.trajectories_per_gpu`."""

    core_gpus: int
    tp: int
    per_gpu: float


@cache
def _sizes(gpu: str, model: str) -> tuple[GPU, ModelShape]:
    return load_gpu(gpu), load_shape(model)


@cache
def _tables(gpu: str, model: str, tp: int) -> EngineTables:
    return EngineTables(engine_seconds(*_sizes(gpu, model), tp))


@cache
def _degrees(gpu: str, model: str) -> tuple[int, ...]:
    found: list[int] = []
    for tp in DEGREES:
        try:
            _tables(gpu, model, tp)
        except ConfigError:
            if tp == DEGREES[-1] and not found:
                raise
        else:
            found.append(tp)
    return tuple(found)


def _ordering(name: str, workload: Workload) -> Ordering:
    made = {"cmlfq": CMLFQ, "paper": Paper, "completed_calls": CompletedCalls}
    if name == "oracle":
        return Oracle(workload.totals())
    if name in made:
        return made[name]()
    return make_ordering(name)


def play(
    cell: Cell, discipline: Discipline, setting: Setting, seed: int, limit_s: float = math.inf, *, causes: bool = True
) -> PipelineResult:
    """One system in one cell and seed; given up once its step must exceed ``limit_s``."""
    workload, steps = cell.workload(seed), STEPS[cell.eta][0]
    plans = workload.trajectories
    mean = sum(plan.final_tokens for plan in plans) // len(plans)
    tables = _tables(cell.gpu, cell.model, setting.tp)
    engines = fleet(
        {setting.tp: (cell.gpus - setting.core_gpus) // setting.tp},
        {setting.tp: tables},
        {setting.tp: slots_of(tables, mean)},
    )
    kv_bytes = _sizes(cell.gpu, cell.model)[1].kv_bytes_per_token(1)
    host = HostPool(int(HOST_BYTES_PER_GPU * cell.gpus / kv_bytes), FETCH_S, kv_bytes / FETCH_BYTES_PER_S)
    options = PipelineOptions(
        eta=cell.eta, core_gpus=setting.core_gpus, rule=TurningRule(setting.per_gpu), host=host, num_steps=steps,
        gives_up=(STEPS[cell.eta][1], limit_s) if limit_s < math.inf else None, causes=causes,
        teacher_token_s=cell.teacher_token_s,
    )  # fmt: skip
    work = group_work(workload, *_sizes(cell.gpu, cell.model))
    return Pipeline(
        workload, engines, _ordering(discipline.order, workload), discipline, work, options, seed=seed
    ).train()


def step_s(cell: Cell, result: PipelineResult) -> float:
    """Seconds of a step, without the first ones; infinite if the simulation was given up."""
    return result.step_s(STEPS[cell.eta][1])


def core_choices(cell: Cell, discipline: Discipline) -> list[int]:
    """Numbers of core trainers to try, the one nearest to training's share of the work first."""
    if not discipline.core_trainers:
        return [0]
    parts = bound_parts(cell)
    ideal = cell.gpus * float(parts.training_s.sum() / (parts.rollout_s + parts.training_s).sum())
    unit = NODE if cell.gpus >= 2 * NODE else 1
    whole = range(unit, cell.gpus - DEGREES[0] + 1, unit)
    near = [gpus for gpus in whole if ideal / 2 - unit / 2 <= gpus <= 1.7 * ideal + unit]
    none = [0] if discipline.roles is not Roles.SPLIT else []
    return sorted([*none, *(near or whole)], key=lambda gpus: abs(gpus - ideal))


def tune(
    cell: Cell,
    discipline: Discipline,
    seconds: Callable[[Setting, float], float],
    start: Setting | None = None,
    most_s: float = math.inf,
) -> tuple[Setting, float]:
    """The best setting found, and its seconds of a step.

    First the degree, then core trainers, then the rule; the degree again if one of the others
    changed.
    """
    per_gpu = PER_GPU if discipline.roles is Roles.TURNING and discipline.streaming else PER_GPU[:1]
    rules = [(cell.eta + 1) * each for each in per_gpu]
    degrees = _degrees(cell.gpu, cell.model)
    cores = [core for core in core_choices(cell, discipline) if cell.gpus - core >= degrees[0]]
    best = Setting(cores[0], degrees[0], rules[0])
    if start is not None:
        core, tp, rule = start
        core = core if core in cores else cores[0]
        tp = tp if cell.gpus - core >= tp else degrees[0]
        best = Setting(core, tp, rule if rule in rules else rules[0])
    known = {best: seconds(best, most_s)}
    if known[best] == math.inf:
        return best, math.inf

    def improve(found: Setting, choices: Sequence[Setting]) -> Setting:
        for one in choices:
            if one not in known and (cell.gpus - one.core_gpus) // one.tp > 0:
                known[one] = seconds(one, known[found])
            if known.get(one, math.inf) < known[found]:
                found = one
        return found

    best = improve(best, [best._replace(tp=tp) for tp in degrees])
    first = best
    best = improve(best, [best._replace(core_gpus=core) for core in cores])
    best = improve(best, [best._replace(per_gpu=rule) for rule in rules])
    best = best if best == first else improve(best, [best._replace(tp=tp) for tp in degrees])
    return best, known[best]


class BoundParts(NamedTuple):
    """(iterations,) seconds of rollout and of training on all GPUs at best efficiency, and of the
    critical path: longest trajectory alone on the fastest engine, its gradients, the update."""

    rollout_s: np.ndarray
    training_s: np.ndarray
    path_s: np.ndarray


def bound_parts(cell: Cell, seed: int = 0) -> BoundParts:
    workload, (steps, left_out) = cell.workload(seed), STEPS[cell.eta]
    options = PipelineOptions()
    work = group_work(workload, *_sizes(cell.gpu, cell.model))
    fastest, rows = _tables(cell.gpu, cell.model, _degrees(cell.gpu, cell.model)[-1]), []
    for iteration in range(left_out, steps):
        plans = [plan for plan in workload.trajectories if plan.iteration == iteration]
        contexts = [mean_context(plan) for plan in plans]
        tokens = np.array([plan.new_tokens for plan in plans], float)
        context = float((tokens * contexts).sum() / tokens.sum())
        each_s = []
        for tp in _degrees(cell.gpu, cell.model):
            tables = _tables(cell.gpu, cell.model, tp)
            slots = slots_of(tables, int(context))
            each_s.append(tp * tables.step_s(slots, slots * context) / slots)
        alone_s = [
            plan.new_tokens * fastest.step_s(1, at) + sum(turn.tool_s for turn in plan.turns if turn.status != NO_TOOL)
            for plan, at in zip(plans, contexts, strict=True)
        ]
        groups = [work[place] for place in dict.fromkeys((plan.iteration, plan.group) for plan in plans)]
        update_s = options.update_s + options.close_s
        rows.append((
            tokens.sum() * min(each_s) / cell.gpus,
            sum(group.gpu_s for group in groups) / cell.gpus,
            max(alone_s) + update_s + min(group.longest_s for group in groups),
        ))  # fmt: skip
    return BoundParts(*np.array(rows).T)


def mean_context(plan: TrajectoryPlan) -> float:
    context, weighted = float(plan.prompt_tokens), 0.0
    for turn in plan.turns:
        weighted += turn.new_tokens * (context + turn.new_tokens / 2)
        context += turn.new_tokens + turn.payload_tokens
    return weighted / plan.new_tokens


def lower_bound_s(cell: Cell, seed: int = 0) -> float:
    """Mean seconds of a step that no discipline beats without speculation, training on all groups.

    The maximum of the work at best efficiency on all GPUs, and the critical path over ``eta + 1``
    steps, without prefill.
    """
    parts = bound_parts(cell, seed)
    return float(np.maximum(parts.rollout_s + parts.training_s, parts.path_s / (cell.eta + 1)).mean())
