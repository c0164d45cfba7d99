"""A plan from a snapshot: formulate, search, simulate draining, compare alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from libra.errors import PlanError
from libra.planner.drain import Pace, best_concurrency
from libra.planner.engine_packing import Placement, filled, pack, placed, placement_of
from libra.planner.plan import Alternative, Bounds, Bucket, Plan, Training
from libra.planner.planning_problem import Floats, Ints, Problem, gpu_seconds
from libra.planner.search import Found, Planner
from libra.planner.snapshot import Formulation, PlanningSnapshot, formulate

NUM_ALTERNATIVES = 3
DRAIN_MARGIN_FRAC = 0.02
"""Share of a step by which an alternative must beat the search's optimum once draining is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A split and layout from the search, evaluated with draining."""

    name: str
    found: Found
    placement: Placement
    buckets: tuple[Bucket, ...]
    rollout_s: float
    slow_rollout_s: float
    step_s: float

    @property
    def engines(self) -> dict[int, int]:
        """Number of engines by TP degree."""
        return {bucket.tp: bucket.engines for bucket in self.buckets}

    @property
    def same_as(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Training GPUs and engines; candidates with equal values are duplicates."""
        return self.found.train_gpus, tuple(sorted(self.engines.items()))


def plan(snapshot: PlanningSnapshot, planner: Planner | None = None) -> Plan:
    """The plan for a snapshot: the search's optimum, or an alternative that drains faster.

    PlanError if nothing fits; the message names the constraint and what to change.
    """
    planner = planner or Planner()
    formulation = formulate(snapshot)
    paces = _paces(snapshot, formulation)
    found = planner.search(formulation.problem)
    best = evaluated("the search's optimum", snapshot, formulation, paces, found)
    drain = best.rollout_s / found.rollout_s
    others = [
        evaluated(name, snapshot, formulation, paces, other)
        for name, other in _others(formulation.problem, found, drain, planner)
    ]
    quickest = min([best, *others], key=lambda candidate: candidate.step_s)
    chosen = quickest if quickest.step_s < best.step_s * (1 - DRAIN_MARGIN_FRAC) else best
    rest = sorted((c for c in [best, *others] if c.same_as != chosen.same_as), key=lambda c: c.step_s)
    distinct = {c.same_as: c for c in reversed(rest)}.values()
    next_best = sorted((comparison(c, chosen) for c in distinct), key=lambda other: other.step_s)[:NUM_ALTERNATIVES]
    return _plan(snapshot, formulation, found, chosen, tuple(next_best))


def compare(
    snapshot: PlanningSnapshot, other: PlanningSnapshot, name: str, planner: Planner | None = None
) -> Alternative:
    """Why ``other``, which fixes setting ``name``, has a longer step than ``snapshot``."""
    planner, candidates = planner or Planner(), []
    for which in (snapshot, other):
        formulation = formulate(which)
        found = planner.search(formulation.problem)
        candidates.append(evaluated(name, which, formulation, _paces(which, formulation), found))
    return comparison(candidates[1], candidates[0])


def _paces(snapshot: PlanningSnapshot, formulation: Formulation) -> list[Pace]:
    alone_s = np.where(np.isfinite(formulation.alone_s), formulation.alone_s, 0.0)
    engines = zip(formulation.engines.values(), alone_s, strict=True)
    return [Pace.of(snapshot.workload, engine, each_s) for engine, each_s in engines]


def _of_degrees(problem: Problem, degrees: Ints | int) -> Problem:
    return problem.having(load_s=np.where(np.isin(problem.tp, degrees)[:, None], problem.load_s, np.inf))


def _others(problem: Problem, found: Found, drain: float, planner: Planner) -> list[tuple[str, Found]]:
    """Alternatives: loads scaled by drain, a single TP degree, a smaller or larger trainer."""
    asked = [("balanced with draining", problem.having(load_s=problem.load_s * drain))]
    degrees, counts, now = sorted(set(problem.tp.tolist())), problem.train_gpus.tolist(), found.train_gpus
    if len(degrees) > 1 and not problem.fixed_engines:
        asked += [(f"TP{degree} for all engines", _of_degrees(problem, degree)) for degree in degrees]
    if problem.fixed_train_gpus is None:
        at = counts.index(now)
        near = {now // 2, *counts[max(at - 1, 0) : at + 2], now * 2} & set(counts) - {now}
        asked += [(f"{count} GPUs for training", problem.having(fixed_train_gpus=count)) for count in sorted(near)]
    answers = []
    for name, other in asked:
        with suppress(PlanError):  # infeasible: not an alternative
            answers.append((name, _retimed(problem, planner.search(other))))
    return answers


def _retimed(problem: Problem, found: Found) -> Found:
    layout = placement_of(problem, found.layout.kind_of, found.layout.engine_of)
    step_s = float(problem.step_s(found.train_gpus, found.train_s, layout.time_s))
    return replace(found, layout=layout, rollout_s=layout.time_s, step_s=step_s)


def evaluated(
    name: str, snapshot: PlanningSnapshot, formulation: Formulation, paces: list[Pace], found: Found
) -> Candidate:
    """A search result with spare GPUs in use, and buckets evaluated with draining."""
    problem, placement, waited_s = formulation.problem, found.layout, formulation.beside.waited_s
    if not problem.fixed_engines:
        placement = filled(_of_degrees(problem, problem.tp[placement.kind_of]), placement, found.rollout_gpus)
    buckets, slow_s = _buckets(snapshot, formulation, paces, placement)
    rollout_s, slow_s = max(waited_s, *(bucket.rollout_s for bucket in buckets)), max(waited_s, slow_s)
    step_s = float(problem.step_s(found.train_gpus, found.train_s, rollout_s))
    return Candidate(name, found, placement, buckets, rollout_s, slow_s, step_s)


def _buckets(
    snapshot: PlanningSnapshot, formulation: Formulation, paces: list[Pace], placement: Placement
) -> tuple[tuple[Bucket, ...], float]:
    problem = formulation.problem
    kinds = placement.kind_of[placement.engine_of]
    tokens = snapshot.workload.generated_tokens
    present = [k for k in range(len(problem.kinds)) if (placement.kind_of == k).any()]
    bounds = _boundaries(problem, kinds, tokens, present)
    buckets, slow_s = [], 0.0
    for k in present:
        kind, mine = problem.kinds[k], np.flatnonzero(placement.kind_of == k)
        items = np.flatnonzero(kinds == k)
        engines = [np.flatnonzero(placement.engine_of == e) for e in _last_engines(formulation, placement, mine)]
        concurrency, rollout_s, slowest_s = best_concurrency(paces[k], engines, kind.concurrency)
        slow_s = max(slow_s, slowest_s)
        context = float(snapshot.workload.mean_context_tokens[items].mean()) if len(items) else 0.0
        engine = formulation.engines[kind.tp]
        at_once = min(concurrency, -(-len(items) // len(mine)))
        low, high = bounds[k]
        buckets.append(
            Bucket(
                tp=kind.tp,
                engines=len(mine),
                concurrency=concurrency,
                from_tokens=low,
                to_tokens=high,
                num_trajectories=len(items),
                load_frac=float(placement.load_s[mine].mean() / max(rollout_s, 1e-9)),
                rollout_s=rollout_s,
                kv_capacity_tokens=int(engine.kv_capacity_tokens),
                kv_used_frac=float(at_once * context / engine.kv_capacity_tokens),
            )
        )
    return tuple(buckets), slow_s


def _last_engines(formulation: Formulation, placement: Placement, mine: Ints) -> list[int]:
    most = int(mine[placement.load_s[mine].argmax()])
    items = np.flatnonzero(np.isin(placement.engine_of, mine))
    if not len(items):
        return [most]
    kinds = placement.kind_of[placement.engine_of[items]]
    longest = int(items[formulation.alone_s[kinds, items].argmax()])
    return sorted({most, int(placement.engine_of[longest])})


def _boundaries(
    problem: Problem, kinds: Ints, tokens: Floats, present: list[int]
) -> dict[int, tuple[float, float | None]]:
    """Range of generated tokens for each kind that gives it the same load as the layout does."""
    cost = problem.tp[kinds] * problem.load_s[kinds, np.arange(len(tokens))]
    order = np.argsort(tokens, kind="stable")
    total = np.cumsum(cost[order])
    share, low = 0.0, 0.0
    bounds: dict[int, tuple[float, float | None]] = {}
    used = [k for k in present if (kinds == k).any()]
    for k in used:
        share += float(cost[kinds == k].sum())
        at = int(np.searchsorted(total, share * (1 - 1e-12)))
        high = None if k == used[-1] else float(tokens[order[min(at + 1, len(order) - 1)]])
        bounds[k] = (low, high)
        low = low if high is None else high
    return {k: bounds.get(k, (low, None)) for k in present}


def _limit(candidate: Candidate, waited_for: str = "teacher and services") -> str:
    """Bottleneck of a step: a key of `libra.planner.plan.WHY`."""
    last = max(candidate.buckets, key=lambda bucket: bucket.rollout_s)
    if candidate.found.train_s > candidate.rollout_s:
        return "training"
    if candidate.rollout_s > last.rollout_s:
        return waited_for
    return "rollout throughput" if last.load_frac > 0.75 else "longest trajectory"


def comparison(candidate: Candidate, chosen: Candidate) -> Alternative:
    """Step of a candidate, and why it is not chosen."""
    slower, found = candidate.step_s / chosen.step_s - 1, candidate.found
    last = max(candidate.buckets, key=lambda bucket: bucket.rollout_s)
    busy, trains = f"busy {100 * last.load_frac:.0f} %", f"training takes {found.train_s:.1f} s"
    reason = {
        "training": f"training on {found.train_gpus} GPU{'s' * (found.train_gpus != 1)} takes {found.train_s:.1f} s, rollout "
        f"{candidate.rollout_s:.1f} s",
        "teacher and services": f"teacher and services take {candidate.rollout_s:.1f} s for the batch; {trains}",
        "rollout throughput": f"rollout on {candidate.placement.kind_of.size} engines has too little throughput: TP{last.tp} "
        f"engines are {busy} of {last.rollout_s:.1f} s; {trains}",
        "longest trajectory": f"its longest trajectories take {last.rollout_s:.1f} s on TP{last.tp}, whose engines are {busy} of "
        f"it; {trains}",
    }[_limit(candidate)]
    if slower < -DRAIN_MARGIN_FRAC:
        reason = f"faster, but excluded by the settings of the plan: {reason}"
    elif slower <= DRAIN_MARGIN_FRAC:
        reason = f"within the accuracy of the model ({100 * slower:+.1f} %): {reason}"
    return Alternative(candidate.name, found.train_gpus, candidate.engines, candidate.step_s, slower, reason)


def _plan(
    snapshot: PlanningSnapshot,
    formulation: Formulation,
    found: Found,
    chosen: Candidate,
    alternatives: tuple[Alternative, ...],
) -> Plan:
    problem, mine = formulation.problem, chosen.found
    train, cost = mine.train_gpus, formulation.training[mine.train_gpus]
    model_s, slow_s = problem.step_s(train, mine.train_s, np.array([mine.rollout_s, chosen.slow_rollout_s])).tolist()
    spare = problem.num_gpus - train - chosen.placement.gpus(problem)
    fewest = pack(problem, max(mine.rollout_s, mine.train_s if problem.eta else 0.0), problem.num_gpus - train)
    needed = train + min(chosen.placement.gpus(problem), fewest.gpus(problem) if fewest is not None else 10**9)
    throughput_s = gpu_seconds(problem).gpu_s[-1] / max(problem.num_gpus - train, 1)
    num_gpus = snapshot.num_gpus
    teacher_gpus, services_gpus = snapshot.services.gpus(num_gpus)
    return Plan(
        gpu=snapshot.gpu.name,
        model=snapshot.shape.name,
        num_gpus=num_gpus,
        gpus_per_node=problem.gpus_per_node,
        eta=problem.eta,
        num_trajectories=problem.num_trajectories,
        training=Training(
            train,
            snapshot.training.kind,
            mine.train_s,
            cost.communication_s,
            cost.memory_bytes + formulation.beside.trainer_bytes,
            cost.headroom_bytes - formulation.beside.trainer_bytes,
        ),
        buckets=chosen.buckets,
        spare_gpus=spare,
        needed_gpus=needed,
        step_s=chosen.step_s,
        low_s=model_s,
        high_s=max(slow_s, chosen.step_s),
        rollout_s=chosen.rollout_s,
        train_s=mine.train_s,
        update_s=problem.update_s,
        beside_s=float(problem.beside(train)),
        bottleneck=_limit(chosen, formulation.beside.waited_for),
        bounds=Bounds(
            found.lower_s,
            found.gap_frac,
            mine.step_s / found.lower_s - 1,
            found.binning_frac,
            formulation.longest_s if formulation.beside.waited_s else found.longest_s,
            float(throughput_s),
            mine.train_s,
        ),
        idle_frac=_idle(
            problem,
            chosen,
            spare,
            {
                "the teacher waits for groups": (teacher_gpus, formulation.beside.teacher_s),
                "services wait to be asked": (services_gpus, formulation.beside.services_s),
            },
        ),
        gpu_hours_per_step=num_gpus * chosen.step_s / 3600.0,
        alternatives=alternatives,
        nodes=placed(problem.num_gpus, problem.gpus_per_node, train, chosen.engines),
        left_out={f"TP{tp}": reason for tp, reason in formulation.left_out.items()},
        teacher_gpus=teacher_gpus,
        teacher_s=formulation.beside.teacher_s,
        teacher_on=snapshot.services.teacher_on(num_gpus),
        services_gpus=services_gpus,
        services_s=formulation.beside.services_s,
        services_on=snapshot.services.services_on(num_gpus),
    )


def _idle(problem: Problem, chosen: Candidate, spare: int, others: Mapping[str, tuple[int, float]]) -> dict[str, float]:
    """Idle shares of a step's GPU-seconds by cause; ``others``: cause to (GPUs, busy seconds)."""
    all_s = (problem.num_gpus + sum(gpus for gpus, _ in others.values())) * chosen.step_s
    train, used = chosen.found.train_gpus, chosen.placement.gpus(problem)
    busy = float((problem.tp[chosen.placement.kind_of] * chosen.placement.load_s).sum()) + train * chosen.found.train_s
    beside_s, train_s = float(problem.beside(train)), chosen.found.train_s
    trainer_s, engines_s = problem.update_s - min(beside_s, train_s), problem.update_s - beside_s  # without work
    parts = {
        "no pool needs them": spare * chosen.step_s,
        "trainer waits for rollout": train * (chosen.step_s - trainer_s - train_s),
        "engines wait for the trainer": used * (chosen.step_s - engines_s - chosen.rollout_s),
        "engines drain, or wait for their longest trajectory": used * chosen.rollout_s - (busy - train * train_s),
        "weights are updated": train * trainer_s + used * engines_s,
    }
    for cause, (gpus, seconds) in others.items():
        if gpus:
            used_s = gpus * min(seconds, chosen.step_s)
            parts[cause] = gpus * chosen.step_s - used_s
            busy += used_s
    return {"busy": busy / all_s, **{cause: max(value, 0.0) / all_s for cause, value in parts.items()}}
