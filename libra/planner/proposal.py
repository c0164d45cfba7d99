"""What a run is proposed after an iteration: the quickest plan among a split, GPUs that do both, and engines of one degree.

A plan places whole trajectories by lengths that it knows. A run places them before their lengths are known, which costs nothing
where engines are alike, and much where they are not: on Qwen3-14B and 24 A800 GPUs simulated under C-MLFQ, mixed layouts took
1.3 to 1.6 times what was planned, those of one degree 1.02 to 1.08 times (engines of `benchmarks.elastic_drift`). So mixed
engines are proposed to a run only where they are planned to gain more than `MIXED_MARGIN_FRAC`; `libra plan` shows them
whatever they gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from libra.errors import PlanError
from libra.planner.build_plan import plan
from libra.planner.phase_sharing import Sharing, shared_plan
from libra.planner.plan import Plan
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot

MIXED_MARGIN_FRAC = 0.25
"""Share of a step that engines of several TP degrees have to gain on those of one: what not knowing lengths costs them."""


def proposal(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None = None) -> Plan:
    """The plan to weigh against what runs.

    Raises
    ------
    PlanError
        Nothing fits.
    """
    free = _quickest(snapshot, planner, sharing)
    if len([bucket for bucket in free.buckets if bucket.engines]) < 2:
        return free
    alike = min(_of_one_degree(snapshot, planner, sharing), key=lambda found: found.step_s, default=None)
    if alike is None or free.step_s < alike.step_s * (1 - MIXED_MARGIN_FRAC):
        return free
    return alike


def _of_one_degree(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None) -> Iterator[Plan]:
    for degree in snapshot.tp:
        try:
            yield _quickest(replace(snapshot, tp=(degree,)), planner, sharing)
        except PlanError:
            continue  # the model does not fit on it, or trajectories do not: it is no alternative


def _quickest(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None) -> Plan:
    split = plan(snapshot, planner)
    if sharing is None:
        return split
    return min(split, shared_plan(snapshot, sharing, planner), key=lambda found: found.step_s)
