"""Replanning in virtual time for `benchmarks.elastic_drift`: after each iteration update the forecasts, plan again, compare.

Plans use the whole cost model. At staleness bound 0 the phases of a step exclude each other, so that one part of any split
always waits; with `Sharing`, hybrid workers serve both phases, and a step pays for two role changes::

    step = rollout on (all - core trainers) + training on (all - core engines) + update + change

`libra run` changes no role within an iteration, and compares its own measurements (`libra.planner.replan`).

Source: the elastic hybrid pool of Libra (arXiv:2606.03077 v2), which changes roles between iterations; here also within one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from libra.errors import PlanError
from libra.facts import PlanConsidered
from libra.planner.arrangements import ROLES, Deployed
from libra.planner.build_plan import plan
from libra.planner.cost import ManySeconds, TrajectoryTotals
from libra.planner.plan import Plan
from libra.planner.replan import MIXED_MARGIN_FRAC, Replanner
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot, formulate

GAP_FRAC = 5e-3
"""Gap of the plans in the loop: well below the error of predictions, and quick to reach."""
HALF_LIFE_STEPS = 5.0
"""Steps after which an observation counts half: lengths and batches drift within tens of steps."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The correction of one phase: a weighted sum of log(realised / predicted); newer steps count more.

    The first step counts in full: a constant error is gone after one.
    """

    weight: float = 0.0
    log_sum: float = 0.0

    @property
    def factor(self) -> float:
        """Realised seconds for each predicted one; 1 before the first step."""
        return math.exp(self.log_sum / self.weight) if self.weight else 1.0

    def after(self, raw_s: float, realised_s: float) -> Learned:
        """With a step that was predicted to take ``raw_s`` without correction and took ``realised_s``."""
        keep = 0.5 ** (1.0 / HALF_LIFE_STEPS)
        return Learned(keep * self.weight + 1.0, keep * self.log_sum + math.log(realised_s / raw_s))


# ---------------------------------------------------------------- GPUs that do both


@dataclass(frozen=True, slots=True)
class Sharing:
    """GPUs that never change their role, and the seconds that a step is longer because the others change twice in it."""

    core_train_gpus: int
    core_rollout_gpus: int
    change_s: float


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan, and how many of its GPUs roll out and train within a step (0: each is in one pool).

    Where GPUs are shared, ``train_gpus``, ``train_s`` and ``step_s`` are those with sharing; the plan has the engines.
    """

    plan: Plan
    train_gpus: int
    train_s: float
    step_s: float
    shared_gpus: int = 0

    @property
    def deployed(self) -> SharedLayout:
        """What runs once it is carried out."""
        without = Deployed.of(self.plan)
        return SharedLayout(self.train_gpus, without.engines, without.concurrency, self.shared_gpus)


@dataclass(frozen=True, slots=True)
class SharedLayout(Deployed):
    """What runs, and how many GPUs are in both pools."""

    shared_gpus: int = 0

    def same_layout(self, other: SharedLayout) -> bool:
        """Whether split, engines and shared GPUs are the same; concurrency may differ, because changing it is free."""
        same = self.train_gpus == other.train_gpus and dict(self.engines) == dict(other.engines)
        return same and self.shared_gpus == other.shared_gpus


def split_plan(snapshot: PlanningSnapshot, planner: Planner, *, alternatives: bool = True) -> SharedPlan:
    """The plan in which each GPU is in one pool."""
    found = plan(snapshot, planner, alternatives=alternatives)
    return SharedPlan(found, found.training.gpus, found.train_s, found.step_s)


def shared_plan(
    snapshot: PlanningSnapshot, sharing: Sharing, planner: Planner, *, alternatives: bool = True
) -> SharedPlan:
    """The plan in which every GPU but the cores' does both; its engines are ``snapshot.fixed_engines`` where they are given.

    Raises
    ------
    PlanError
        The run is not synchronous, nothing is left to share, or a phase does not fit.
    """
    shared = snapshot.num_gpus - sharing.core_train_gpus - sharing.core_rollout_gpus
    if snapshot.eta != 0 or shared < 1:
        raise PlanError(f"sharing: eta is {snapshot.eta} and {shared} GPUs are not core; give eta 0 and smaller cores")
    train_gpus = snapshot.num_gpus - sharing.core_rollout_gpus
    costs = formulate(snapshot).training
    if train_gpus not in costs or not costs[train_gpus].fits:
        raise PlanError(f"sharing: training does not run on {train_gpus} GPUs; change core_rollout_gpus")
    # The engines' side as a split would have it, the core trainers held apart; its own training seconds are not used.
    found = plan(replace(snapshot, fixed_train_gpus=sharing.core_train_gpus), planner, alternatives=alternatives)
    train_s = costs[train_gpus].step_s * snapshot.training_factor
    return SharedPlan(found, train_gpus, train_s, found.step_s + train_s - found.train_s + sharing.change_s, shared)


def proposal(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None = None) -> SharedPlan:
    """The plan to weigh: the quickest split or sharing, of engines of one degree unless mixed ones gain `MIXED_MARGIN_FRAC`."""
    free = _quickest(snapshot, planner, sharing)
    if sum(bucket.engines > 0 for bucket in free.plan.buckets) < 2:
        return free
    alike = min(_of_one_degree(snapshot, planner, sharing), key=lambda found: found.step_s, default=None)
    return free if alike is None or free.step_s < alike.step_s * (1 - MIXED_MARGIN_FRAC) else alike


def _of_one_degree(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None) -> Iterator[SharedPlan]:
    for degree in snapshot.tp:
        try:
            yield _quickest(replace(snapshot, tp=(degree,)), planner, sharing)
        except PlanError:
            continue  # the model or the trajectories do not fit on it: no alternative


def _quickest(snapshot: PlanningSnapshot, planner: Planner, sharing: Sharing | None) -> SharedPlan:
    split = split_plan(snapshot, planner)
    if sharing is None:
        return split
    return min(split, shared_plan(snapshot, sharing, planner), key=lambda found: found.step_s)


# ---------------------------------------------------------------- the loop


@dataclass(frozen=True, slots=True)
class Slowed:
    """An engine whose steps take ``factor`` times as long."""

    engine: ManySeconds
    factor: float

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        return value if not name.endswith("_s") else lambda *given: self.factor * value(*given)


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """Results of an iteration: the decision, its predicted seconds, those of the next one, and the proposal."""

    considered: PlanConsidered
    predicted_step_s: float
    next_step_s: float
    proposed: SharedPlan


@dataclass(slots=True)
class PlanLoop:
    """State of replanning between iterations.

    Parameters
    ----------
    snapshot : PlanningSnapshot
        Hardware, model and limits; its workload is the one expected of the first iteration.
    deployed : SharedLayout
    replanner : Replanner
    sharing : Sharing or None
        None: each GPU is in one pool.
    """

    snapshot: PlanningSnapshot
    deployed: SharedLayout
    replanner: Replanner = field(default_factory=Replanner)
    sharing: Sharing | None = None
    rollout: Learned = Learned()
    training: Learned = Learned()
    planner: Planner = field(default_factory=lambda: Planner(GAP_FRAC))
    predicted: SharedPlan = field(init=False)
    engines: Mapping[int, ManySeconds] = field(init=False)

    def __post_init__(self) -> None:
        self.engines = formulate(self.snapshot).engines
        self.predicted = self._of_deployed()

    def after(
        self, iteration: int, rollout_s: float, train_s: float, workload: TrajectoryTotals, remaining_iterations: int
    ) -> LoopOutcome:
        """Update from an iteration's seconds and trajectories, and compare plans for more of them."""
        before_s = self.predicted.step_s
        # What this iteration's own trajectories should have taken: lengths that came differently are no error of the model.
        self.snapshot = replace(self.snapshot, workload=workload)
        same = self._of_deployed()
        self.rollout = self.rollout.after(same.plan.rollout_s / self.rollout.factor, rollout_s)
        self.training = self.training.after(same.train_s / self.training.factor, train_s)
        current = self._of_deployed()
        proposed = proposal(self._corrected(), self.planner, self.sharing)
        wanted = proposed.deployed
        considered = self.replanner.weigh(
            iteration, current.step_s, wanted, proposed.step_s, remaining_iterations,
            kinds=() if self.deployed.same_layout(wanted) else (ROLES,),
        )  # fmt: skip
        if considered.accepted:
            self.deployed = wanted
        self.predicted = proposed if considered.accepted else current
        return LoopOutcome(considered, before_s, self.predicted.step_s, proposed)

    def _corrected(self) -> PlanningSnapshot:
        engines = {tp: Slowed(engine, self.rollout.factor) for tp, engine in self.engines.items()}
        return replace(self.snapshot, engines=engines, training_factor=self.training.factor)

    def _of_deployed(self) -> SharedPlan:
        """The plan of the running layout."""
        now = self.deployed
        fixed = {tp: now.engines.get(tp, 0) for tp in self.snapshot.tp}
        forced = replace(self._corrected(), fixed_engines=fixed)
        if isinstance(now, SharedLayout) and now.shared_gpus:
            assert self.sharing is not None
            return shared_plan(forced, self.sharing, self.planner, alternatives=False)
        return split_plan(replace(forced, fixed_train_gpus=now.train_gpus), self.planner, alternatives=False)
