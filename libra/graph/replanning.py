"""Plans that are carried out: after each iteration, whether other hybrid workers should train, and the change of their roles.

1. A change is asked for once, between iterations; nobody waits for it. While one goes on, nothing else is asked for.
2. What runs is what the scheduler says (``libra_roles``), never what was asked for: there a change is seen
   that failed or was undone.
3. Every consideration is in the event log, accepted or not (``plan_considered``). A change that was carried out is followed by
   ``plan_realised`` after the first iteration that began and ended with it, with what it gained and cost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from libra.errors import ClusterError
from libra.events import to_dict
from libra.planner.measured import StepForecast
from libra.planner.replan import Rules
from libra.planner.splits import Batch, Fleet, Hybrid, SplitLoop, Weighed
from libra.planner.telling import considered_events

logger = logging.getLogger(__name__)


class RoleCalls(Protocol):
    """What is asked of the scheduler about roles; `libra.graph.asking_roles.RoleControl` in a run."""

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Of each worker that can change: worker, role, tp, stage, generation, and seconds of its last change (None: none yet)."""

    def change(self, assignments: Mapping[str, str]) -> int:
        """Begin a change to these roles; its generation, or ClusterError."""


@dataclass(frozen=True, slots=True)
class Change:
    """One that was asked for: after which iteration, what it should gain, what trained before, and who changes to what."""

    iteration: int
    predicted_gain_frac: float
    training_before: int
    roles: Mapping[str, str]
    generation: int


class Replanning:
    """The split of one run, followed iteration by iteration.

    Parameters
    ----------
    calls : RoleCalls
    core_trainers : int
    tell : callable
        Takes (name, fields) of an event for the run's log.
    rules : Rules
    """

    def __init__(
        self,
        calls: RoleCalls,
        core_trainers: int,
        tell: Callable[[str, Mapping[str, Any]], None],
        rules: Rules | None = None,
    ) -> None:
        self._calls, self._core, self._tell = calls, core_trainers, tell
        self.loop = SplitLoop(rules or Rules())
        self._change: Change | None = None
        self._began_with: Fleet | None = None  # what the iteration that is under way began with
        self._known = StepForecast()  # before the iteration that is under way

    def after(
        self,
        iteration: int,
        values: Mapping[str, Any],
        realised_step_s: float,
        kinds: Mapping[str, str],
        present: Collection[str],
        forecast: StepForecast,
        remaining: int,
        overlap: bool,
    ) -> Weighed | None:
        """Hear an iteration: learn from it, compare a change with what it was to gain, weigh the splits, ask for a change.

        Parameters
        ----------
        values : mapping
            Numbers of the iteration.
        realised_step_s : float
            Evaluations left out.
        kinds : mapping of worker to str
            Kind of engine of every rollout worker that was ever there.
        present : collection of str
            Workers that supply slots for generations now.
        forecast : StepForecast
            With this iteration in it.
        remaining : int
            Iterations to come.
        overlap : bool
            Whether batches are generated while steps are taken.
        """
        rows = list(self._calls.rows())
        fleet, batch = self._fleet(rows, kinds, present), batch_of(values)
        whole = self._began_with == fleet
        if whole:
            replicas = self._core + int(values.get("hybrids", 0))
            train_s = float(values.get("train_s", 0.0))
            self.loop.learn(self._known, fleet, batch, replicas, train_s, realised_step_s, overlap)
        self._began_with, self._known = fleet, forecast
        if self._change is not None:
            self._follow(self._change, iteration, rows, fleet, whole, batch, realised_step_s, forecast, overlap)
        weighed = (
            self.loop.weigh(iteration, forecast, fleet, batch, remaining, overlap) if self._change is None else None
        )
        if weighed is not None:
            predicted_s = weighed.options[fleet.training].step_s
            for event in considered_events(weighed.considered, predicted_s, realised_step_s):
                self._tell(event.name, fields_of(event))
            if weighed.roles:
                self._ask(iteration, weighed, fleet)
        return weighed

    def _fleet(self, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], present: Collection[str]) -> Fleet:
        hybrids = tuple(
            Hybrid(str(row["worker"]), kinds[row["worker"]], row["role"] == "train", int(row.get("residents", 0)))
            for row in rows
            if row["worker"] in kinds and row["stage"] not in ("lost", "failed") and row["role"] != "lent"
        )
        others = set(present) - {str(row["worker"]) for row in rows}
        return Fleet(dict(Counter(kinds[worker] for worker in others)), hybrids, self._core)

    def _ask(self, iteration: int, weighed: Weighed, fleet: Fleet) -> None:
        try:
            generation = self._calls.change(weighed.roles)
        except ClusterError as error:  # somebody else changes roles, or a worker has just left: the next plan sees it
            logger.warning("the plan of iteration %d is not carried out: %s", iteration, error)
            return
        self._change = Change(iteration, weighed.considered.gain_frac, fleet.training, dict(weighed.roles), generation)
        logger.info(
            "%s: %s (change %d)", weighed.considered.reason,
            ", ".join(f"{name} to {role}" for name, role in sorted(weighed.roles.items())), self._change.generation,
        )  # fmt: skip

    def _follow(
        self,
        change: Change,
        iteration: int,
        rows: Sequence[Mapping[str, Any]],
        fleet: Fleet,
        whole: bool,
        batch: Batch,
        step_s: float,
        forecast: StepForecast,
        overlap: bool,
    ) -> None:
        now = {str(row["worker"]): row for row in rows}
        stages = {now[name]["stage"] for name in change.roles if name in now}
        if not stages <= {"resupplied", "failed"}:
            return
        if "failed" in stages or any(
            name not in now or now[name]["role"] != role for name, role in change.roles.items()
        ):
            logger.warning("change %d was not carried out, or undone; see role_change_failed", change.generation)
            self._change = None
            return
        if not whole:
            return  # it was carried out in the middle of this iteration
        before = self.loop.expected(forecast, fleet, batch, change.training_before, overlap)
        cost_s = change_cost_s(rows, change.generation)
        self._change = None
        if cost_s is not None and self.loop.replanner is not None:
            self.loop.replanner.changed(cost_s)
        if before is None:
            return
        gained = 1.0 - step_s / before.step_s
        fields = {
            "iteration": change.iteration, "generation": change.generation, "predicted_gain_frac": change.predicted_gain_frac,
            "realised_gain_frac": gained, "realised_iteration": iteration, "cost_s": cost_s,
        }  # fmt: skip
        self._tell("plan_realised", fields)
        logger.info(
            "change %d gains %.1f %% of a step, %.1f %% were predicted", change.generation, 100 * gained,
            100 * change.predicted_gain_frac,
        )  # fmt: skip


def batch_of(values: Mapping[str, Any]) -> Batch:
    """What an iteration generated, and what its step was taken on."""
    return Batch(float(values["generated_tokens"]), float(values.get("forwarded_tokens", values["generated_tokens"])))


def change_cost_s(rows: Iterable[Mapping[str, Any]], generation: int) -> float | None:
    """Seconds of a change until its slowest worker was in its new role; None where no worker's last change was this one."""
    spent = (row["seconds"] for row in rows if row["generation"] == generation)
    return max((float(seconds) for seconds in spent if seconds is not None), default=None)


def fields_of(event: Any) -> dict[str, Any]:
    """Fields of an event beside those that the log adds."""
    return {name: value for name, value in to_dict(event).items() if name not in ("schema", "name", "run", "t_s")}
