"""Events and decisions of a log as sentences, for ``libra replay``."""

from __future__ import annotations

from libra import events
from libra.policy import Command, OpenBatch, OpenGate, Place, Prefer, SetPriority

Subject = tuple[str, str | int]
"""What a decision is about: ("trajectory", key), ("gate", iteration) or ("batch", step)."""

NAMES = {
    "SetPriority": "places in the order",
    "Prefer": "expected lengths",
    "Place": "slots given",
    "OpenGate": "gate openings",
    "OpenBatch": "batch openings",
}
"""What each command is called, in the plural."""


def subject_of(command: Command) -> Subject:
    """What a command is about."""
    match command:
        case SetPriority(key=key) | Prefer(key=key) | Place(key=key):
            return "trajectory", key
        case OpenGate(iteration=iteration):
            return "gate", iteration
        case OpenBatch(batch=batch):
            return "batch", batch


def subject_text(subject: Subject) -> str:
    """The subject as it is read."""
    kind, which = subject
    words = {"gate": f"iteration {which}", "batch": f"batch {which}"}
    return words.get(kind, str(which))


def concerns(event: events.Event, subject: Subject, members: tuple[tuple[int, int], ...]) -> bool:
    """Whether an event is part of the story of a subject; ``members`` are the groups of a batch."""
    kind, which = subject
    match event:
        case events.RunStarted():
            return True
        case events.GateParked(iteration=iteration) | events.GateOpened(iteration=iteration):
            return kind == "gate" and iteration == which
        case events.BatchParked(batch=batch) | events.BatchOpened(batch=batch):
            return kind == "batch" and batch == which
        case events.VersionPublished():
            return kind in ("gate", "batch") and event.version <= int(which)
        case events.GroupCommitted(split="train", iteration=iteration, group=group):
            return kind == "batch" and (iteration, group) in members
    return kind == "trajectory" and getattr(event, "key", None) == which


def event_text(event: events.Event) -> str:
    """One event as a sentence without a subject it shares with its neighbours."""
    match event:
        case events.RunStarted():
            return f"epoch {event.epoch} begins: eta {event.eta}, {event.groups_per_batch} groups a batch, policy {event.policy}"
        case events.GateParked():
            return f"iteration {event.iteration} asks to begin"
        case events.GateOpened():
            return f"iteration {event.iteration} begins: {event.reason}"
        case events.TrajectoryParked():
            place = f"gets place {list(event.priority)}: {event.reason}" if event.priority else "gets no place"
            return f"{event.key} waits for {event.phase} after {event.quanta} quanta, {place}"
        case events.PrioritySet():
            return f"{event.key} gets place {list(event.priority)}: {event.reason}"
        case events.QuantumDispatched():
            return (
                f"quantum {event.quantum} is given a {event.phase} slot on {event.worker}, from place {list(event.priority)}: "
                f"{event.reason}"
            )
        case events.BucketsPreferred():
            buckets = f"may take slots of {', '.join(event.buckets)} too" if event.buckets else "stays in its bucket"
            return f"{event.key} {buckets}: {event.reason}, {event.final_tokens} of context in the end"
        case events.HomeForgotten():
            return f"{event.key} goes on wherever there is room: its last attempt failed"
        case events.QuantumContinued():
            return (
                f"quantum {event.quantum} begins in the same {event.phase} slot on {event.worker}: nobody waited for it"
            )
        case events.QuantumFinished():
            what = f"{event.tokens} tokens" if event.tokens else f"tool {event.tool or '-'}: {event.status or '-'}"
            end = f"; the trajectory ends: {event.end}" if event.end else ""
            return f"quantum {event.quantum} of {event.key} is committed by {event.worker} ({event.phase}, {what}){end}"
        case events.TrajectoryEnded():
            return f"{event.key} is over" + ("" if event.completed else ", without an end of its own")
        case _:
            return _other_text(event)


def _other_text(event: events.Event) -> str:
    match event:
        case events.QuantumLost():
            return f"quantum {event.quantum} is lost with {event.address}, the {event.times}. time in a row"
        case events.QuantumGivenBack():
            return f"quantum {event.quantum} is given back by {event.address}, whose engine was put to sleep"
        case events.FailureClassified():
            return f"failure of class {event.failure}: {event.detail}"
        case events.GroupCommitted():
            which = f"group {event.group} of iteration {event.iteration} ({event.split})"
            return f"{which} is committed, oldest version {event.oldest_version}"
        case events.BatchParked():
            return f"batch {event.batch} asks for its groups"
        case events.BatchOpened():
            return f"batch {event.batch} opens with {len(event.members)} groups: {event.reason}"
        case events.VersionPublished():
            return f"version {event.version} is published"
        case events.StallDetected():
            return f"no progress for {event.idle_s:.0f} s: {event.detail}"
        case events.PlanConsidered():
            return f"a plan of {event.proposed_step_s:.1f} s a step is weighed against {event.current_step_s:.1f} s: {event.reason}"
        case events.PlanAccepted():
            return f"the plan is accepted: {event.train_gpus} GPUs for training, engines {dict(event.engines)}"
        case events.PlanRealised():
            return (
                f"change {event.generation} gains {100 * event.realised_gain_frac:.1f} % of a step, "
                f"{100 * event.predicted_gain_frac:.1f} % were predicted"
            )
        case events.PolicySnapshot():
            return "snapshot of what the policy knows"
        case _:
            return _role_text(event)


def _role_text(event: events.Event) -> str:
    match event:
        case events.RoleChangeStarted():
            wanted = ", ".join(f"{worker}: {has['role']} tp={has['tp']}" for worker, has in event.assignments.items())
            return f"role change {event.generation} begins ({event.reason}): {wanted}"
        case events.RoleChanged():
            return f"{event.worker} goes from {event.from_role} to {event.to_role} in {event.seconds:.1f} s"
        case events.RoleChangeFailed():
            return f"role change {event.generation} is undone: {event.detail}"
    return event.name
