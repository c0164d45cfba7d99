"""Events of the log in words: what planner, roles, limits and policy decided, and what happened to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libra import events
from libra.observe.html import duration, number

DECISIONS: Final = (
    events.LayoutPlanned, events.PlanConsidered, events.PlanAccepted, events.PlanBlocked, events.PlanRealised,
    events.RoleChangeStarted, events.RoleChanged, events.RoleRestored, events.RoleChangeFailed, events.RoleChangeCancelled,
    events.SlotsSet, events.BoundariesSet, events.StepsPlanned, events.StepsChosen,
)  # fmt: skip
LATE: Final = (events.LateRewardsTaken,)
TURNS: Final = (events.EngineTurned, events.TurnRefused)
TROUBLES: Final = (
    events.WorkerLost, events.WorkerSetupFailed, events.EngineQuarantined, events.StallDetected,
    events.GangLost, events.RoleMemberFailed, events.MismatchFound,
)  # fmt: skip


def _engines(engines: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"{count} x tp{tp}" for tp, count, *_ in engines) or "no engine"


def turn_words(event: events.EngineTurned | events.TurnRefused) -> tuple[str, str]:
    """A turn of an engine, or that there is none, and the reason."""
    if isinstance(event, events.TurnRefused):
        return f"{event.worker} stays as it is until the next version", event.detail
    return f"{event.worker} {'turns to training' if event.to == 'training' else 'generates again'}", event.reason


def late_words(event: events.LateRewardsTaken) -> tuple[str, str]:
    """What a batch does about late rewards, and why."""
    if event.awaited:
        return f"step {event.batch} waits", f"{event.awaited} rewards of its members are late"
    dropped = f", {len(event.dropped)} are dropped after {event.versions} versions" if event.dropped else ""
    ages = [age for *_, age in event.arrived]
    old = f"{min(ages)} to {max(ages)} versions old; " if ages else ""
    why = f"{old}{event.on_time} more came before their own step, {event.waiting} groups wait"
    return f"step {event.batch} corrects for {len(ages)} late rewards{dropped}", why


def decision_words(event: events.Event) -> tuple[str, str]:
    """Decision and reason."""
    match event:
        case events.LayoutPlanned():
            return f"start with {event.train_gpus} training, {_engines(event.engines)}", event.reason
        case events.PlanConsidered():
            verdict = "accepted" if event.accepted else "not accepted"
            plan = f"{event.train_gpus} training, {_engines(event.engines)}"
            return f"after iteration {event.iteration}: {plan}: {verdict}", event.reason
        case events.PlanAccepted():
            carried = ", ".join(f"{name} {words}" for name, words in event.commands)
            return f"carry out the plan of iteration {event.iteration}", carried
        case events.PlanBlocked():
            return f"plan of iteration {event.iteration} cannot be carried out", f"missing: {event.missing}"
        case events.PlanRealised():
            cost = f", cost {number(event.cost_s, ',.2f', ' s')}" if event.cost_s is not None else ""
            what = f"result of the plan of iteration {event.iteration}, in iteration {event.realised_iteration}"
            return f"{what}, by the forecast of its batch", f"change {event.generation}{cost}"
        case events.RoleChangeStarted():
            return f"change {event.generation} of {', '.join(event.assignments)}", event.reason
        case events.RoleChanged():
            roles = f"{event.worker}: {event.from_role} tp{event.from_tp} to {event.to_role} tp{event.to_tp}"
            return roles, f"change {event.generation} took {number(event.seconds, ',.2f', ' s')}"
        case events.RoleRestored():
            return f"{event.worker}: {event.role} tp{event.tp} again", f"change {event.generation} was undone"
        case events.RoleChangeFailed():
            return f"change {event.generation} failed", event.detail
        case events.RoleChangeCancelled():
            return f"change {event.generation} was cancelled", "on request"
        case events.SlotsSet():
            return f"{event.worker}: at most {event.slots} trajectories at once", event.reason
        case events.LateRewardsTaken():
            return late_words(event)
        case events.BoundariesSet():
            return f"boundaries {', '.join(f'tp{tp}: {tokens:g}' for tp, tokens in event.boundaries)}", event.reason
    return steps_words(event)


def steps_words(event: events.Event) -> tuple[str, str]:
    """How steps are taken from now on, and why; of another event its name."""
    match event:
        case events.StepsPlanned():
            return f"steps begin by {event.way}, of {', '.join(event.ways)}", event.reason
        case events.StepsChosen():
            return f"steps are taken by {event.way}", event.reason
    return event.name, ""


def trouble_words(event: events.Event) -> tuple[str, str, str]:
    """What happened, where, and details."""
    match event:
        case events.WorkerLost():
            return "worker lost", event.worker or event.address, ""
        case events.WorkerSetupFailed():
            return "setup failed", event.worker, event.detail
        case events.EngineQuarantined():
            return "engine failed the version check", event.worker, event.detail
        case events.StallDetected():
            return f"no progress for {duration(event.idle_s)}", event.worker or event.key, event.detail
        case events.MismatchFound():
            return f"engine and trainer disagree at step {event.step}", "", event.detail
        case events.GangLost() | events.RoleMemberFailed():
            return event.name.replace("_", " "), event.worker, event.detail
    return event.name, "", ""
