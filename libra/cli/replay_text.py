"""Events and decisions of a log as sentences, for ``libra replay``."""

from __future__ import annotations

from collections.abc import Iterable

from libra import events
from libra.observe.decision_words import late_words
from libra.policy import (
    Command,
    LoadVersion,
    OpenBatch,
    OpenGate,
    OpenWave,
    Place,
    Prefer,
    SetPriority,
    TakeSteps,
    Turn,
    Vacate,
)
from libra.untrusted import shown_line

MAX_EVENT_CHARS = 3000
"""Longest sentence of one event; the detail of a failure has at most 2,000."""

Subject = tuple[str, str | int]
"""What a decision is about: ("trajectory", key), ("gate", iteration), ("batch", step), ("worker", name) or ("steps", "steps")."""

NAMES = {
    "SetPriority": "priorities",
    "Prefer": "bucket preferences",
    "Place": "dispatches",
    "OpenGate": "gate openings",
    "OpenBatch": "batch openings",
    "OpenWave": "wave openings",
    "Turn": "turns of engines",
    "LoadVersion": "loads of versions",
    "Vacate": "engines that give their trajectories away",
    "TakeSteps": "choices of how steps are taken",
}
"""The name of each command, in the plural."""


def subject_of(command: Command) -> Subject:
    """The subject of a command."""
    match command:
        case SetPriority(key=key) | Prefer(key=key) | Place(key=key):
            return "trajectory", key
        case OpenGate(iteration=iteration):
            return "gate", iteration
        case OpenBatch(batch=batch) | OpenWave(batch=batch):
            return "batch", batch
        case Turn(worker=worker) | LoadVersion(worker=worker) | Vacate(worker=worker):
            return "worker", worker
        case TakeSteps():
            return "steps", "steps"


def subject_text(subject: Subject) -> str:
    """The subject in words."""
    kind, which = subject
    words = {"gate": f"iteration {which}", "batch": f"batch {which}"}
    return words.get(kind, str(which))


def concerns(event: events.Event, subject: Subject, members: tuple[tuple[int, int], ...]) -> bool:
    """Whether an event belongs to the history of a subject; ``members`` are the groups of a batch."""
    kind, which = subject
    match event:
        case events.RunStarted():
            return True
        case events.GateParked(iteration=iteration) | events.GateOpened(iteration=iteration):
            return kind == "gate" and iteration == which
        case events.BatchParked(batch=batch) | events.BatchOpened(batch=batch):
            return kind == "batch" and batch == which
        case events.WaveParked(batch=batch) | events.WaveOpened(batch=batch) | events.WaveTrained(batch=batch):
            return kind == "batch" and batch == which
        case events.LateRewardsTaken(batch=batch):
            return kind == "batch" and batch == which
        case events.VersionPublished():
            return kind in ("gate", "batch") and event.version <= int(which)
        case events.EngineTurned(worker=worker) | events.TurnRefused(worker=worker) | events.RoleChanged(worker=worker):
            return kind == "worker" and worker == which
        case events.VersionOrdered(worker=worker) | events.VersionServed(worker=worker):
            return kind == "worker" and worker == which
        case events.EngineVacated(worker=worker, keys=moved):
            return worker == which if kind == "worker" else kind == "trajectory" and which in moved
        case events.GroupCommitted(split="train", iteration=iteration, group=group):
            return kind == "batch" and (iteration, group) in members
        case events.StepsPlanned() | events.StepMeasured() | events.StepsChosen():
            return kind == "steps"
    return kind == "trajectory" and getattr(event, "key", None) == which


def event_text(event: events.Event) -> str:
    """One event as a sentence, on one line."""
    return shown_line(_text_of(event), MAX_EVENT_CHARS)


def _text_of(event: events.Event) -> str:
    match event:
        case events.RunStarted():
            return f"epoch {event.epoch} begins: eta {event.eta}, {event.groups_per_batch} groups per batch, policy {event.policy}"
        case events.GateParked():
            return f"iteration {event.iteration} waits at its gate"
        case events.GateOpened():
            return f"iteration {event.iteration} begins: {event.reason}"
        case events.TrajectoryParked():
            place = f"priority {list(event.priority)}: {event.reason}" if event.priority else "no priority"
            return f"{event.key} waits for {event.phase} after {event.quanta} quanta, {place}"
        case events.PrioritySet():
            return f"{event.key} has priority {list(event.priority)}: {event.reason}"
        case events.QuantumDispatched():
            return (
                f"quantum {event.quantum} gets a {event.phase} slot on {event.worker}, priority {list(event.priority)}: "
                f"{event.reason}"
            )
        case events.BucketsPreferred():
            buckets = f"may also use {', '.join(event.buckets)}" if event.buckets else "stays in its bucket"
            return f"{event.key} {buckets}: {event.reason}, forecast final context {event.final_tokens} tokens"
        case events.HomeForgotten():
            return f"{event.key} no longer has a home: its last attempt failed"
        case events.QuantumContinued():
            return f"quantum {event.quantum} begins in the same {event.phase} slot on {event.worker}: no trajectory waited for it"
        case events.QuantumFinished():
            what = f"{event.tokens} tokens" if event.tokens else f"tool {event.tool or '-'}: {event.status or '-'}"
            end = (
                f"; the trajectory ends: {event.end}" if event.end else "; the turn goes on" if event.unfinished else ""
            )
            return f"quantum {event.quantum} of {event.key} is committed by {event.worker} ({event.phase}, {what}){end}"
        case events.TrajectoryEnded():
            return f"{event.key} has ended" + ("" if event.completed else ", incomplete")
        case _:
            return _other_text(event)


def _wave_text(event: events.WaveParked | events.WaveOpened | events.WaveTrained) -> str:
    wave = f"wave {event.wave} of batch {event.batch}"
    match event:
        case events.WaveParked():
            return f"{wave} requests its groups"
        case events.WaveOpened():
            return f"{wave} opens with {len(event.members)} groups: {event.reason}"
        case events.WaveTrained():
            missing = f", {event.missing} were left for later ones" if event.missing else ""
            helped = f" by the trainers and {event.hybrids} engines that turned" if event.hybrids else ""
            return f"{wave}: {event.groups} groups trained in {event.train_s:.3g} s{helped}{missing}"


def _batch_text(event: events.BatchParked | events.BatchOpened | events.LateRewardsTaken) -> str:
    match event:
        case events.BatchParked():
            return f"batch {event.batch} waits for its groups"
        case events.BatchOpened():
            return f"batch {event.batch} opens with {len(event.members)} groups: {event.reason}"
        case events.LateRewardsTaken():
            return ": ".join(late_words(event))


def _other_text(event: events.Event) -> str:
    match event:
        case events.QuantumLost():
            return f"quantum {event.quantum} is lost with worker {event.address}, time {event.times} in a row"
        case events.QuantumGivenBack():
            why = "whose engine sleeps" if event.phase == "ROLLOUT" else "which stopped it or has no room"
            return f"quantum {event.quantum} is returned by {event.address}, {why}"
        case events.LeaseRevoked():
            return f"the action of {event.key} stops on {event.worker} after {event.ran_s:.3g} s: {event.reason}"
        case events.FailureClassified():
            return f"failure of class {event.failure}: {event.detail}"
        case events.GroupCommitted():
            which = f"group {event.group} of iteration {event.iteration} ({event.split})"
            return f"{which} is committed, oldest version {event.oldest_version}"
        case events.BatchParked() | events.BatchOpened() | events.LateRewardsTaken():
            return _batch_text(event)
        case events.WaveParked() | events.WaveOpened() | events.WaveTrained():
            return _wave_text(event)
        case events.VersionPublished():
            return f"version {event.version} is published"
        case events.StallDetected():
            return f"no progress for {event.idle_s:.0f} s: {event.detail}"
        case events.PlanConsidered():
            return f"a plan of {event.proposed_step_s:.1f} s per step, now {event.current_step_s:.1f} s: {event.reason}"
        case events.PlanAccepted():
            return f"the plan is accepted: {event.train_gpus} GPUs for training, engines {dict(event.engines)}"
        case events.PlanRealised():
            return (
                f"change {event.generation} gains {100 * event.realised_gain_frac:.1f} % of a step, "
                f"{100 * event.predicted_gain_frac:.1f} % were predicted"
            )
        case events.PolicySnapshot():
            return "snapshot of the policy"
        case _:
            return _role_text(event)


def _role_text(event: events.Event) -> str:
    match event:
        case events.RoleChangeStarted():
            wanted = ", ".join(f"{worker}: {has['role']} tp={has['tp']}" for worker, has in event.assignments.items())
            return f"role change {event.generation} begins ({event.reason}): {wanted}"
        case events.RoleChanged():
            return f"{event.worker} changes from {event.from_role} to {event.to_role} in {event.seconds:.1f} s"
        case events.EngineTurned():
            return f"the engine of {event.worker} turns to {event.to}: {event.reason}"
        case events.TurnRefused():
            return f"{event.worker} stays as it is until the next version: {event.detail}"
        case events.RoleMemberKnown():
            return f"{event.worker} can change its role"
        case events.RoleChangeFailed():
            return f"role change {event.generation} is undone: {event.detail}"
        case events.LayoutPlanned():
            return f"the run begins with {event.train_gpus} GPUs for training: {event.reason}"
        case events.PlanBlocked():
            return f"the plan of iteration {event.iteration} is not possible: {event.missing}"
        case events.SlotsSet():
            return f"{event.worker} takes at most {event.slots} trajectories at once: {event.reason}"
        case events.BoundariesSet():
            return f"boundaries {', '.join(f'tp{tp}: {tokens:g}' for tp, tokens in event.boundaries)}: {event.reason}"
        case events.StepsPlanned():
            return f"steps begin by {event.way}, of {', '.join(event.ways)}: {event.reason}"
        case events.StepMeasured():
            trained_s = sum(seconds for _, seconds in event.waves)
            return (
                f"step {event.step} was measured: groups complete after {event.complete_s[0]:.3g} to {event.complete_s[-1]:.3g} s, "
                f"{len(event.waves)} waves of {trained_s:.3g} s, {event.update_s:.3g} s for new weights"
            )
        case events.StepsChosen():
            return f"steps are taken by {event.way}: {event.reason}"
        case _:
            return _version_text(event)


def _version_text(event: events.Event) -> str:
    match event:
        case events.VersionOrdered():
            return f"{event.worker} is to take version {event.version}: {event.reason}"
        case events.VersionServed():
            return f"{event.worker} serves version {event.version}, loaded in {event.load_s:.3g} s"
        case events.EngineVacated():
            moved = f"{len(event.keys)} trajectories to other engines of their version"
            return f"{event.worker} gives {moved}: {event.reason}"
    return event.name


def forecast_results(told: Iterable[tuple[int, events.Event]], key: str) -> dict[int, str]:
    """For each forecast of a trajectory's tokens, by its line: how many it generated from there to its end."""
    results, open_, tokens = dict[int, str](), dict[int, int](), 0
    for line, event in told:
        if getattr(event, "key", None) != key:
            continue
        match event:
            case events.QuantumFinished():
                tokens += event.tokens
            case events.BucketsPreferred() if event.left_tokens > 0:
                open_[line] = tokens
            case events.HomeForgotten():
                results |= dict.fromkeys(open_, "; realised: not known, the attempt failed")
                open_.clear()
            case events.TrajectoryEnded():
                results |= {line: f"; realised: {tokens - before} tokens" for line, before in open_.items()}
                open_.clear()
    return results | dict.fromkeys(open_, "; realised: not known yet")
