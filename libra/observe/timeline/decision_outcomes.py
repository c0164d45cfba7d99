"""Predicted against realised gain of decisions of planner, roles and limits. Pure.

An interval lasts from the end of one iteration to the end of the next; its figure is seconds per
generated token, because batch lengths differ. The realised gain of a change is 1 - after / before,
over at most `WINDOW` intervals on each side. Batches and weights differ between the sides, so this
is not an experiment.

1. An interval counts on neither side if it is the first of a start, or if in it the arrangement
   changed, a role change was in progress, a worker joined or left, or held-out questions were
   answered.
2. No interval beyond another change counts. Changes without an interval between them share one
   outcome.
3. Without comparable intervals the gain is None, with a reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from libra import facts, keys
from libra.facts import Fact, Line

WINDOW: Final = 3
"""Maximum intervals on each side of a change."""
NOT_KNOWN: Final = "not known"
NOT_CARRIED_OUT: Final = "not carried out"
_CHANGES: Final = (
    facts.SlotsSet, facts.BoundariesSet, facts.RoleChangeStarted, facts.RoleChanged, facts.RoleRestored,
    facts.RoleChangeFailed, facts.RoleChangeCancelled, facts.WorkerJoined, facts.WorkerLost, facts.EngineQuarantined,
    facts.GangFormed, facts.GangLost,
)  # fmt: skip
_DECISIONS: Final = (
    facts.LayoutPlanned, facts.PlanConsidered, facts.PlanBlocked, facts.RoleChangeStarted, facts.SlotsSet,
    facts.BoundariesSet,
)  # fmt: skip


class Outcome(NamedTuple):
    """Prediction and result of one decision, as shares of a step.

    A layout at a run's start has step seconds instead. ``before`` and ``after`` count intervals;
    ``why`` explains a missing result, else empty.
    """

    event: Fact
    predicted_frac: float | None = None
    realised_frac: float | None = None
    predicted_s: float | None = None
    realised_s: float | None = None
    before: int = 0
    after: int = 0
    why: str = ""
    t_s: float = 0.0

    @property
    def realised_words(self) -> str:
        """Result for a table, or why there is none."""
        if self.realised_s is not None:
            return f"{self.realised_s:,.1f} s ({self.after} iterations)"
        if self.realised_frac is None:
            return self.why
        return f"{100 * self.realised_frac:.1f} % ({self.before} iterations against {self.after})"

    @property
    def predicted_words(self) -> str:
        """Prediction for a table; empty without one."""
        if self.predicted_s is not None:
            return f"{self.predicted_s:,.1f} s"
        return "" if self.predicted_frac is None else f"{100 * self.predicted_frac:.1f} %"


@dataclass(slots=True)
class _Interval:
    begin_s: float | None  # None for the first interval of a start
    changed: bool
    seconds: float = 0.0
    tokens: int = 0
    evaluates: bool = False
    ended: bool = False

    @property
    def counts(self) -> bool:
        return self.ended and not self.changed and not self.evaluates and self.tokens > 0


@dataclass(slots=True)
class _Decision:
    event: Fact
    interval: int
    t_s: float
    # Generations of the role changes that executed it; None for slots:
    commands: list[int | None] = field(default_factory=list)


class DecisionOutcomes:
    """Follows a log event by event; `outcomes` may be read at any time."""

    def __init__(self) -> None:
        self._intervals = [_Interval(None, changed=True)]
        self._decisions: list[_Decision] = []
        self._open: dict[int, set[str]] = {}
        self._failed: set[int] = set()

    def add(self, line: Line) -> int | None:
        """Process the next log line; returns the index of its decision in `outcomes`, or None."""
        now, t_s, event = self._intervals[-1], line.t_s, line.fact
        match event:
            case facts.RunStarted():
                self._open.clear()
                self._failed.clear()
                self._intervals.append(_Interval(None, changed=True))
            case facts.QuantumFinished():
                now.tokens += event.tokens
                now.evaluates |= (parsed := keys.parse(event.key)) is not None and parsed.split != "train"
            case facts.IterationFinished():
                now.ended, now.seconds = True, t_s - (now.begin_s or 0.0)
                self._intervals.append(_Interval(t_s, changed=bool(self._open)))
            case _ if isinstance(event, _CHANGES):
                now.changed = True
                self._follow_roles(event)
        return self._decided(t_s, event) if isinstance(event, _DECISIONS) else None

    def outcomes(self) -> list[Outcome]:
        """One outcome per decision so far, in order."""
        return [self._outcome(decision)._replace(t_s=decision.t_s) for decision in self._decisions]

    def _follow_roles(self, event: Fact) -> None:
        match event:
            case facts.RoleChangeStarted():
                self._open[event.generation] = set(event.assignments)
            case facts.RoleChanged() | facts.RoleRestored():
                members = self._open.get(event.generation, set())
                members.discard(event.worker)
                if not members:
                    self._open.pop(event.generation, None)
            case facts.RoleChangeFailed() | facts.RoleChangeCancelled():
                self._failed.add(event.generation)
                self._open.pop(event.generation, None)

    def _decided(self, t_s: float, event: Fact) -> int:
        here = len(self._intervals) - 1
        if isinstance(event, facts.SlotsSet | facts.RoleChangeStarted):
            plans = [each for each in self._decisions if isinstance(each.event, facts.PlanConsidered)]
            if plans and plans[-1].interval == here:
                plans[-1].commands.append(getattr(event, "generation", None))
        self._decisions.append(_Decision(event, here, t_s))
        return len(self._decisions) - 1

    def _outcome(self, decision: _Decision) -> Outcome:
        event, gain, commands = decision.event, None, list[int | None]()
        match event:
            case facts.LayoutPlanned():
                after = self._after(decision.interval)
                seconds = sum(each.seconds for each in after) / len(after) if after else None
                why = "" if after else f"{NOT_KNOWN}: no iteration with it alone"
                return Outcome(event, predicted_s=event.step_s, realised_s=seconds, after=len(after), why=why)
            case facts.PlanBlocked():
                return Outcome(event, event.gain_frac, why=NOT_CARRIED_OUT)
            case facts.PlanConsidered():
                gain = 1 - event.proposed_step_s / event.current_step_s if event.current_step_s > 0 else None
                if not event.accepted or not decision.commands:
                    return Outcome(event, gain, why=NOT_CARRIED_OUT)
                commands = decision.commands
            case facts.RoleChangeStarted():
                commands = [event.generation]
        if self._failed.intersection(commands):
            return Outcome(event, gain, why=f"{NOT_CARRIED_OUT}: its role switch failed or was cancelled")
        before, after = _first(reversed(self._intervals[: decision.interval])), self._after(decision.interval)
        compared = Outcome(event, gain, before=len(before), after=len(after))
        if before and after:
            return compared._replace(realised_frac=1 - _pace_s(after) / _pace_s(before))
        side = "after" if before else "before"
        return compared._replace(why=f"{NOT_KNOWN}: no comparable iteration {side} it")

    def _after(self, interval: int) -> list[_Interval]:
        return _first(itertools.dropwhile(lambda each: each.changed, self._intervals[interval:]))


def _first(intervals: Iterable[_Interval]) -> list[_Interval]:
    unchanged = itertools.takewhile(lambda each: not each.changed, intervals)
    return list(itertools.islice((each for each in unchanged if each.counts), WINDOW))


def _pace_s(intervals: Sequence[_Interval]) -> float:
    return sum(each.seconds for each in intervals) / sum(each.tokens for each in intervals)


def forecast_results(lines: Iterable[tuple[int, Fact]], key: str) -> dict[int, str]:
    """Tokens that each trajectory generated after its forecast, by the log line of the forecast."""
    results, open_, tokens = dict[int, str](), dict[int, int](), 0
    for line, event in lines:
        if getattr(event, "key", None) != key:
            continue
        match event:
            case facts.QuantumFinished():
                tokens += event.tokens
            case facts.Prefer() if event.left_tokens > 0:
                open_[line] = tokens
            case facts.HomeForgotten():
                results |= dict.fromkeys(open_, "; realised: not known, the attempt failed")
                open_.clear()
            case facts.TrajectoryEnded():
                results |= {line: f"; realised: {tokens - before} tokens" for line, before in open_.items()}
                open_.clear()
    return results | dict.fromkeys(open_, "; realised: not known yet")
