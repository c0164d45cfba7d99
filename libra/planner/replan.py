"""When a better plan is worth a change: a pure decision with all its numbers, and bounded flapping.

1. A plan is accepted only if what it gains over the iterations that remain exceeds the measured mean cost of past changes by the
   margin of `Rules.cost_factor`, and its gain per step exceeds both `Rules.least_gain_frac` and what predictions are off by.
2. It must win `Rules.confirmations` considerations in a row, and `Rules.rest_iterations` must have passed since the last
   change. So in n iterations there are at most 1 + n / max(confirmations, rest) changes, whatever the metrics do.
3. Every consideration is a `Considered`, accepted or not, with the numbers it rests on; no clock, no I/O.

Differs from the published code of Libra, which sets the cost of a change against one iteration's gain, assumes it instead of
measuring it, and has a cooldown of one iteration.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

from libra.errors import PlanError
from libra.planner.plan import Plan
from libra.planner.plan_commands import Command, Deployed, commands

ROLES, REBUCKET, SLOTS = "roles", "rebucket", "slots"
"""Kinds of change, each with a price of its own: who trains, whose GPUs are one engine, how many trajectories one takes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Hysteresis of replanning.

    Attributes
    ----------
    least_gain_frac : float
        Gain per step, as a share of it, below which nothing is changed.
    noise_factor : float
        The gain must be this many times the root mean square error of past predictions.
    cost_factor : float
        The gain over the remaining iterations must be this many times the cost of the change.
    confirmations : int
        Considerations in a row that must find a gain.
    rest_iterations : int
        Iterations after a change in which there is no other.
    first_cost_s : float
        Assumed until a change of a kind has been measured: Libra reports 10.8 s from training to rollout and 8.0 s back
        (arXiv:2606.03077 v2); the sum. Slots are a number in the scheduler: the first change of them is taken to cost nothing.
    """

    least_gain_frac: float = 0.05
    noise_factor: float = 2.0
    cost_factor: float = 1.5
    confirmations: int = 2
    rest_iterations: int = 3
    first_cost_s: float = 18.8

    def first_of(self, kind: str) -> float:
        """Seconds that the first change of a kind is taken to cost."""
        return 0.0 if kind == SLOTS else self.first_cost_s

    def __post_init__(self) -> None:
        if self.confirmations < 1 or self.rest_iterations < 0 or self.cost_factor < 1 or self.least_gain_frac < 0:
            raise PlanError(
                f"rules: got {self}; confirmations and cost_factor are at least 1, the others are not negative"
            )


@dataclass(frozen=True, slots=True)
class Considered:
    """A plan that was weighed against what runs.

    Attributes
    ----------
    iteration : int
        The one that just finished.
    current_step_s, proposed_step_s : float
        Predicted for what runs and for the proposal, by the same corrected model.
    gain_s : float
        Over the remaining iterations.
    cost_s : float
        Mean of past changes, or what is assumed before the first.
    num_changes : int
        Changes that mean is of.
    remaining_iterations : int
    required_gain_frac : float
        Per step, from hysteresis and noise.
    confirmed : int
        Considerations in a row that found enough gain, this one included.
    accepted : bool
    reason : str
    train_gpus : int
    engines : tuple of (TP degree, number)
    commands : tuple
        What carries it out; empty where it was not accepted.
    concurrency : tuple of (TP degree, slots)
        Of one engine; empty: not said.
    """

    iteration: int
    current_step_s: float
    proposed_step_s: float
    gain_s: float
    cost_s: float
    num_changes: int
    remaining_iterations: int
    required_gain_frac: float
    confirmed: int
    accepted: bool
    reason: str
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    commands: tuple[Command, ...]
    concurrency: tuple[tuple[int, int], ...] = ()

    @property
    def gain_frac(self) -> float:
        """Gain per step, as a share of the current one."""
        return 1.0 - self.proposed_step_s / self.current_step_s if self.current_step_s > 0 else 0.0


@dataclass(slots=True)
class Replanner:
    """Weighs proposals, and remembers what runs, what changes cost and how often a proposal has won.

    Parameters
    ----------
    deployed : Deployed
        What runs now.
    rules : Rules
    """

    deployed: Deployed
    rules: Rules = field(default_factory=Rules)
    costs_s: dict[str, list[float]] = field(default_factory=dict)
    confirmed: int = 0
    last_change: int | None = None

    def cost_s(self, kinds: Collection[str] = (ROLES,)) -> float:
        """Expected cost of a change of these kinds: of each the mean of those that were, or what is taken for the first one."""
        return sum(
            statistics.fmean(self.costs_s[kind]) if self.costs_s.get(kind) else self.rules.first_of(kind)
            for kind in kinds
        )

    def num_changes(self, kinds: Collection[str] = (ROLES,)) -> int:
        """Changes that this mean is of."""
        return sum(len(self.costs_s.get(kind, ())) for kind in kinds)

    def changed(self, cost_s: float, kind: str = ROLES) -> None:
        """Hear what the last accepted change of a kind cost, in seconds of the run."""
        if not cost_s >= 0:
            raise PlanError(f"cost of a change: got {cost_s} s; it is not negative")
        self.costs_s.setdefault(kind, []).append(cost_s)

    def consider(
        self, iteration: int, current_step_s: float, plan: Plan, remaining_iterations: int, noise_frac: float = 0.0
    ) -> Considered:
        """Weigh a plan against what runs; where it is accepted, it is what runs from now on.

        Parameters
        ----------
        iteration : int
            Rising from call to call.
        current_step_s : float
            Predicted step of what runs, by the model that made the plan.
        plan : Plan
        remaining_iterations : int
        noise_frac : float
            Error of past predictions (`libra.planner.cost_correction.CostCorrection.noise_frac`).
        """
        edges = tuple(bucket.to_tokens for bucket in plan.buckets if bucket.to_tokens is not None)
        wanted = Deployed.of(plan)
        return self.weigh(iteration, current_step_s, wanted, plan.step_s, remaining_iterations, noise_frac, edges)

    def weigh(
        self,
        iteration: int,
        current_step_s: float,
        wanted: Deployed,
        step_s: float,
        remaining_iterations: int,
        noise_frac: float = 0.0,
        boundaries_tokens: tuple[float, ...] = (),
        kinds: Collection[str] | None = None,
        decisive: str = "",
    ) -> Considered:
        """Weigh what is ``wanted``, with a predicted step of ``step_s`` seconds, against what runs; else as `consider`.

        ``kinds`` of change are what it takes (empty: it is what runs), and are what it costs; None: whatever differs in split and
        engines is one change of roles. ``decisive`` is a reason to accept it whatever it gains and costs; empty: there is none.
        """
        rules = self.rules
        kinds = (() if self.deployed.same_layout(wanted) else (ROLES,)) if kinds is None else kinds
        cost_s = self.cost_s(kinds or (ROLES,))
        gain_s = (current_step_s - step_s) * remaining_iterations
        required = max(rules.least_gain_frac, rules.noise_factor * noise_frac)
        gain_frac = 1.0 - step_s / current_step_s if current_step_s > 0 else 0.0
        same = not kinds
        worth = not same and gain_frac > required and gain_s > rules.cost_factor * cost_s
        self.confirmed = self.confirmed + 1 if worth else 0
        resting = self.last_change is not None and iteration - self.last_change <= rules.rest_iterations
        accepted = bool(decisive) or (worth and self.confirmed >= rules.confirmations and not resting)
        if decisive:
            reason = decisive
        elif accepted:
            reason = f"gains {gain_s:.1f} s over {remaining_iterations} iterations for {cost_s:.1f} s"
        elif same:
            reason = "this is what runs"
        elif gain_frac <= required:
            reason = f"gains {100 * gain_frac:.1f} % of a step, {100 * required:.1f} % are required"
        elif not worth:
            reason = (
                f"gains {gain_s:.1f} s over {remaining_iterations} iterations, {rules.cost_factor:g} times the cost of "
                f"{cost_s:.1f} s are required"
            )
        elif resting:
            reason = f"the last change was {iteration - (self.last_change or 0)} iterations ago, {rules.rest_iterations} must pass"
        else:
            reason = f"found {self.confirmed} times in a row, {rules.confirmations} are required"
        asked = commands(self.deployed, wanted, boundaries_tokens, reason) if accepted else ()
        considered = Considered(
            iteration, current_step_s, step_s, gain_s, cost_s, self.num_changes(kinds or (ROLES,)), remaining_iterations,
            required, self.confirmed, accepted, reason, wanted.train_gpus, tuple(sorted(wanted.engines.items())), asked,
            tuple(sorted(wanted.concurrency.items())),
        )  # fmt: skip
        if accepted:
            self.deployed, self.last_change, self.confirmed = wanted, iteration, 0
        return considered
