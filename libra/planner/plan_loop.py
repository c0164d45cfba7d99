"""After each iteration: learn from what it took, plan again with what was learned, and weigh the plan. Pure; the caller has the
clock, the thread and the event log. For plans of the whole cost model, GPUs that do both among them, as `benchmarks.elastic` plays
them; a run weighs what it has itself measured (`libra.planner.arrangement_loop`).

::

    loop = PlanLoop(snapshot, Deployed(train_gpus=1, engines={1: 2}, concurrency={1: 64}))
    outcome = loop.after(iteration, Realised(rollout_s, training_s, step_s), workload, remaining_iterations)
    outcome.metrics, outcome.considered, outcome.considered.commands
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from libra import events
from libra.errors import PlanError
from libra.planner.build_plan import plan
from libra.planner.cost import Workload
from libra.planner.cost_correction import CostCorrection
from libra.planner.phase_sharing import Sharing, shared_plan
from libra.planner.plan import Plan
from libra.planner.plan_commands import Deployed
from libra.planner.plan_log_events import plan_log_events
from libra.planner.proposal import proposal
from libra.planner.replan import Considered, Replanner, Rules
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot

GAP_FRAC = 5e-3
"""Gap of the plans in the loop: a fraction of what predictions are off by, and quick between two steps."""


@dataclass(frozen=True, slots=True)
class RealisedStep:
    """Seconds that an iteration took: until its last trajectory was done, its optimizer step, and from step to step."""

    rollout_s: float
    training_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """What came of an iteration.

    Attributes
    ----------
    considered : Considered
    predicted_step_s : float
        What had been predicted for the iteration, by what was known before it.
    realised_step_s : float
    correction : Correction
        With this iteration in it.
    next_step_s : float
        Prediction for the next one, of what runs then.
    plan : Plan
        The proposal.
    """

    considered: Considered
    predicted_step_s: float
    realised_step_s: float
    correction: CostCorrection
    next_step_s: float
    plan: Plan

    @property
    def metrics(self) -> Mapping[str, float]:
        """For the metrics of the iteration."""
        return {
            "plan/predicted_s": self.predicted_step_s,
            "plan/realised_s": self.realised_step_s,
            "plan/error_frac": self.predicted_step_s / self.realised_step_s - 1.0,
            **{f"plan/{name}": value for name, value in self.learned.items()},
        }

    @property
    def learned(self) -> Mapping[str, float]:
        """The metrics that are neither prediction nor what came of it."""
        return {
            "rollout_factor": self.correction.rollout.factor,
            "training_factor": self.correction.training.factor,
            "proposed_step_s": self.considered.proposed_step_s,
            "accepted": float(self.considered.accepted),
        }

    def events(self, run: str, t_s: float) -> tuple[events.Event, ...]:
        """What the event log is told."""
        edges = tuple(bucket.to_tokens for bucket in self.plan.buckets if bucket.to_tokens is not None)
        concurrency = tuple((bucket.tp, bucket.concurrency) for bucket in self.plan.buckets)
        return plan_log_events(
            self.considered, self.predicted_step_s, self.realised_step_s, self.correction, edges, concurrency, run, t_s
        )


@dataclass(slots=True)
class PlanLoop:
    """What replanning knows between iterations.

    Parameters
    ----------
    snapshot : Snapshot
        Hardware, model and limits; its workload is what is expected of the first iteration.
    deployed : Deployed
        What runs.
    rules : Rules
    sharing : Sharing or None
        What GPUs may do in both phases of a synchronous step; None: each is in one pool.
    """

    snapshot: PlanningSnapshot
    deployed: Deployed
    rules: Rules = field(default_factory=Rules)
    sharing: Sharing | None = None
    correction: CostCorrection = field(default_factory=CostCorrection)
    replanner: Replanner = field(init=False)
    planner: Planner = field(default_factory=lambda: Planner(GAP_FRAC))
    predicted: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.replanner = Replanner(self.deployed, self.rules)
        self.predicted = self._of_deployed()

    def after(
        self,
        iteration: int,
        realised: RealisedStep,
        workload: Workload,
        remaining_iterations: int,
        predicted_step_s: float | None = None,
    ) -> LoopOutcome:
        """Learn from an iteration and weigh what would be better.

        Parameters
        ----------
        iteration : int
        realised : Realised
        workload : Workload
            The trajectories of that iteration, taken as what is to come.
        remaining_iterations : int
        predicted_step_s : float or None
            What a better source predicted for this iteration (`libra.planner.measured_step`); None: this loop's own prediction.
        """
        before = self.predicted.step_s if predicted_step_s is None else predicted_step_s
        # What this iteration's own trajectories should have taken: lengths that came differently are no fault of the model.
        self.snapshot = replace(self.snapshot, workload=workload)
        same = self._of_deployed()
        self.correction = self.correction.after(
            same.rollout_s / self.correction.rollout.factor,
            realised.rollout_s,
            same.train_s / self.correction.training.factor,
            realised.training_s,
        )
        current = self._of_deployed()
        proposed = proposal(self._corrected(), self.planner, self.sharing)
        considered = self.replanner.consider(
            iteration, current.step_s, proposed, remaining_iterations, self.correction.noise_frac
        )
        self.predicted = proposed if considered.accepted else current
        return LoopOutcome(considered, before, realised.step_s, self.correction, self.predicted.step_s, proposed)

    def _corrected(self) -> PlanningSnapshot:
        return replace(self.snapshot, corrections=self.correction.corrections)

    def _of_deployed(self) -> Plan:
        """The plan that is forced to be what runs."""
        now = self.replanner.deployed
        fixed = {tp: now.engines.get(tp, 0) for tp in self.snapshot.tp}
        forced = replace(self._corrected(), fixed_engines=fixed)
        if now.shared_gpus:
            if self.sharing is None:
                raise PlanError(f"deployed: {now.shared_gpus} GPUs do both, and sharing is not given")
            return shared_plan(forced, self.sharing, self.planner, alternatives=False)
        return plan(replace(forced, fixed_train_gpus=now.train_gpus), self.planner, alternatives=False)
