"""GPUs that roll out in one phase of a synchronous step and train in the other: worked out, priced, and compared with a split.

At staleness bound 0 the phases of a step exclude each other, so that of any split one part waits at any time. Hybrid workers can
serve both: the engines have every GPU but the core trainer's, the trainer every GPU but the core engines', and a step pays for
two changes of role.

    step = rollout on (all - core trainers) + training on (all - core engines) + update + change

Source: the elastic hybrid pool of Libra (arXiv:2606.03077 v2), which changes roles between iterations; here also within one.
From staleness bound 1 on the phases overlap, and nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.errors import PlanError
from libra.planner.build_plan import plan
from libra.planner.plan import Alternative, Plan, Training
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot, formulate


@dataclass(frozen=True, slots=True)
class Sharing:
    """What may be shared, and what it costs.

    Attributes
    ----------
    core_train_gpus, core_rollout_gpus : int
        GPUs that never change their role. All others may.
    change_s : float
        Seconds that a step is longer because GPUs go from rollout to training and back in it, all of them at once.
    """

    core_train_gpus: int
    core_rollout_gpus: int
    change_s: float

    def __post_init__(self) -> None:
        if self.core_train_gpus < 1 or self.core_rollout_gpus < 0 or not self.change_s >= 0:
            raise PlanError(f"sharing: got {self}; there is a core trainer, and nothing is negative")


def shared_plan(
    snapshot: PlanningSnapshot, sharing: Sharing, planner: Planner | None = None, *, alternatives: bool = True
) -> Plan:
    """The plan in which every GPU but the cores' does both; ``snapshot.fixed_engines`` are its engines where they are given.

    Parameters
    ----------
    snapshot : Snapshot
        Of a synchronous run (``eta`` 0).
    sharing : Sharing
    planner : Planner, optional
        Remembers layouts of the same workload.
    alternatives : bool
        As of `libra.planner.build_plan.plan`.

    Raises
    ------
    PlanError
        The run is not synchronous, nothing is left to share, or a phase does not fit.
    """
    if snapshot.eta != 0:
        raise PlanError(f"sharing: eta is {snapshot.eta}; phases exclude each other at eta 0 only, type run.eta=0")
    shared = snapshot.num_gpus - sharing.core_train_gpus - sharing.core_rollout_gpus
    if shared < 1:
        raise PlanError(
            f"sharing: cores of {sharing.core_train_gpus} and {sharing.core_rollout_gpus} GPUs leave nothing of "
            f"{snapshot.num_gpus} to share"
        )
    train_gpus = snapshot.num_gpus - sharing.core_rollout_gpus
    costs = formulate(snapshot).training
    if train_gpus not in costs or not costs[train_gpus].fits:
        able = [gpus for gpus, cost in costs.items() if cost.fits]
        raise PlanError(
            f"sharing: training does not run on {train_gpus} GPUs; core_rollout_gpus has to leave one of {able}"
        )
    # The engines' side as a split would have it, the core trainer held apart; its own training seconds are not used.
    engines = plan(replace(snapshot, fixed_train_gpus=sharing.core_train_gpus), planner, alternatives=alternatives)
    cost = costs[train_gpus]
    train_s = cost.step_s * snapshot.corrections.training
    more_s = train_s - engines.train_s + sharing.change_s
    without = Alternative(
        "no GPU shared", engines.training.gpus, engines.engines, engines.step_s, -more_s / (engines.step_s + more_s),
        f"training on {engines.training.gpus} GPUs takes {engines.train_s:.1f} s, all engines waiting",
    )  # fmt: skip
    return replace(
        engines,
        training=Training(
            train_gpus, snapshot.training.kind, train_s, cost.communication_s, cost.memory_bytes, cost.headroom_bytes
        ),
        train_s=train_s,
        step_s=engines.step_s + more_s,
        low_s=engines.low_s + more_s,
        high_s=engines.high_s + more_s,
        shared_gpus=shared,
        alternatives=(without,),
    )
