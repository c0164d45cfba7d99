"""Whether the gain of a better layout exceeds the cost of the change: a pure decision with all its numbers, and bounded
flapping.

1. A layout is accepted only if its gain over the remaining iterations exceeds the mean measured cost of past changes by
   `Rules.cost_factor`, and its gain per step exceeds both `Rules.least_gain_frac` and the error of predictions.
2. It must win `Rules.confirmations` comparisons in a row, and `Rules.rest_iterations` must have passed since the last
   change. So in n iterations there are at most 1 + n / max(confirmations, rest) changes, whatever the metrics do.
3. Every comparison is a `libra.facts.PlanConsidered`, accepted or not, with its numbers; no clock, no I/O.

Differs from the published code of Libra, which compares the cost of a change with one iteration's gain, assumes that cost instead
of measuring it, and has a cooldown of one iteration.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from libra.errors import PlanError
from libra.facts import PlanConsidered
from libra.planner.plan import Plan

ROLES, REBUCKET, SLOTS = "roles", "rebucket", "slots"
"""Kinds of change, each with its own price: roles, grouping of GPUs into engines, slots per engine."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A layout: GPUs of the trainer, engines and concurrency by TP degree."""

    train_gpus: int
    engines: Mapping[int, int]
    concurrency: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan) -> Deployed:
        """The layout of a plan."""
        return cls(
            plan.training.gpus,
            {bucket.tp: bucket.engines for bucket in plan.buckets},
            {bucket.tp: bucket.concurrency for bucket in plan.buckets},
        )

    def same_layout(self, other: Deployed) -> bool:
        """Whether split and engines are the same; concurrency may differ, because changing it is free."""
        return self.train_gpus == other.train_gpus and dict(self.engines) == dict(other.engines)


@dataclass(frozen=True, slots=True)
class SetRole:
    """Give this many more GPUs this role ("train" or "rollout"), taken from the other one."""

    role: str
    num_gpus: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rebucket:
    """Run these engines, as (TP degree, number)."""

    engines: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SetConcurrency:
    """Let each engine of this TP degree generate for this many trajectories at once."""

    tp: int
    concurrency: int
    reason: str


Command = SetRole | Rebucket | SetConcurrency


def commands(deployed: Deployed, wanted: Deployed, reason: str) -> tuple[Command, ...]:
    """The commands from ``deployed`` to ``wanted``, for the event log: roles, then engines, then concurrency; none for
    unchanged parts."""
    found = list[Command]()
    moved = wanted.train_gpus - deployed.train_gpus
    if moved:
        found.append(SetRole("train" if moved > 0 else "rollout", abs(moved), reason))
    if dict(wanted.engines) != dict(deployed.engines):
        found.append(Rebucket(tuple(sorted(wanted.engines.items())), reason))
    for tp, concurrency in wanted.concurrency.items():
        if deployed.concurrency.get(tp) != concurrency:
            found.append(SetConcurrency(tp, concurrency, reason))
    return tuple(found)


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
        Consecutive comparisons that must find a gain.
    rest_iterations : int
        Iterations after a change in which there is no other.
    first_cost_s : float
        Assumed until a change of a kind has been measured: Libra reports 10.8 s from training to rollout and 8.0 s back
        (arXiv:2606.03077 v2); the sum. Slots are a number in the scheduler: the first change of them is assumed to cost nothing.
    """

    least_gain_frac: float = 0.05
    noise_factor: float = 2.0
    cost_factor: float = 1.5
    confirmations: int = 2
    rest_iterations: int = 3
    first_cost_s: float = 18.8

    def __post_init__(self) -> None:
        if self.confirmations < 1 or self.rest_iterations < 0 or self.cost_factor < 1 or self.least_gain_frac < 0:
            raise PlanError(
                f"rules: got {self}; confirmations and cost_factor are at least 1, the others are not negative"
            )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout to compare with the present one.

    Attributes
    ----------
    layout : Deployed
    step_s : float
        Its predicted step.
    kinds : collection of str or None
        Kinds of change that lead to it; empty: it is the present layout. None: any other split or engines are one change of
        roles.
    decisive : str
        Reason to accept it regardless of gain and cost; empty: there is none.
    """

    layout: Deployed
    step_s: float
    kinds: Collection[str] | None = None
    decisive: str = ""


@dataclass(slots=True)
class Replanner:
    """Compares proposals with the present layout; keeps the cost of changes and how often a proposal has won.

    Parameters
    ----------
    deployed : Deployed
        What runs now.
    rules : Rules

    Attributes
    ----------
    orders : tuple of Command
        The commands that carry out the proposal compared last; empty if it was not accepted.
    """

    deployed: Deployed
    rules: Rules = field(default_factory=Rules)
    costs_s: dict[str, list[float]] = field(default_factory=dict)
    confirmed: int = 0
    last_change: int | None = None
    orders: tuple[Command, ...] = ()

    def cost_s(self, kinds: Collection[str] = (ROLES,)) -> float:
        """Expected cost of a change of these kinds: for each the mean of past ones, or the assumption for the first."""
        first = {SLOTS: 0.0}
        return sum(
            statistics.fmean(self.costs_s[kind]) if self.costs_s.get(kind) else first.get(kind, self.rules.first_cost_s)
            for kind in kinds
        )

    def changed(self, cost_s: float, kind: str = ROLES) -> None:
        """Record what the last accepted change of a kind cost, in seconds of the run."""
        if not cost_s >= 0:
            raise PlanError(f"cost of a change: got {cost_s} s; it is not negative")
        self.costs_s.setdefault(kind, []).append(cost_s)

    def weigh(
        self,
        iteration: int,
        current_step_s: float,
        proposal: Proposal,
        remaining_iterations: int,
        noise_frac: float = 0.0,
    ) -> PlanConsidered:
        """Compare a proposal with the present layout; if it is accepted, it is the present layout from now on.

        The caller adds the seconds of the iteration, and its contexts.

        Parameters
        ----------
        iteration : int
            Rising from call to call.
        current_step_s : float
            Predicted step of the present layout, by the model that predicted the proposal's.
        proposal : Proposal
        remaining_iterations : int
        noise_frac : float
            Error of past predictions of a gain, as a share of a step.
        """
        rules, wanted, kinds = self.rules, proposal.layout, proposal.kinds
        if kinds is None:
            kinds = () if self.deployed.same_layout(wanted) else (ROLES,)
        cost_s = self.cost_s(kinds or (ROLES,))
        gain_s = (current_step_s - proposal.step_s) * remaining_iterations
        required = max(rules.least_gain_frac, rules.noise_factor * noise_frac)
        gain_frac = 1.0 - proposal.step_s / current_step_s if current_step_s > 0 else 0.0
        since = None if self.last_change is None else iteration - self.last_change
        worth = bool(kinds) and gain_frac > required and gain_s > rules.cost_factor * cost_s
        self.confirmed = self.confirmed + 1 if worth else 0
        resting = since is not None and since <= rules.rest_iterations
        accepted = bool(proposal.decisive) or (worth and self.confirmed >= rules.confirmations and not resting)
        gains = f"gains {gain_s:.1f} s over {remaining_iterations} iterations"
        if proposal.decisive:
            reason = proposal.decisive
        elif accepted:
            reason = f"{gains} for {cost_s:.1f} s"
        elif not kinds:
            reason = "this is what runs"
        elif gain_frac <= required:
            reason = f"gains {100 * gain_frac:.1f} % of a step, {100 * required:.1f} % are required"
        elif not worth:
            reason = f"{gains}, {rules.cost_factor:g} times the cost of {cost_s:.1f} s are required"
        elif resting:
            reason = f"the last change was {since} iterations ago, {rules.rest_iterations} must pass"
        else:
            reason = f"found {self.confirmed} times in a row, {rules.confirmations} are required"
        self.orders = commands(self.deployed, wanted, reason) if accepted else ()
        if accepted:
            self.deployed, self.last_change, self.confirmed = wanted, iteration, 0
        return PlanConsidered(
            iteration=iteration, predicted_step_s=None, realised_step_s=0.0, current_step_s=current_step_s,
            proposed_step_s=proposal.step_s, gain_s=gain_s, cost_s=cost_s,
            num_changes=sum(len(self.costs_s.get(kind, ())) for kind in kinds or (ROLES,)),
            remaining_iterations=remaining_iterations, required_gain_frac=required, rollout_factor=1.0, training_factor=1.0,
            train_gpus=wanted.train_gpus, engines=tuple(sorted(wanted.engines.items())), accepted=accepted, reason=reason,
            concurrency=tuple(sorted(wanted.concurrency.items())),
        )  # fmt: skip
