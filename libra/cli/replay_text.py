"""Events and decisions of a log as sentences, for ``libra replay``."""

from __future__ import annotations

from collections.abc import Iterable

from libra import facts
from libra.facts import Command, Fact
from libra.untrusted import shown_line

MAX_EVENT_CHARS = 3000
"""Longest sentence of one event; the detail of a failure has at most 2,000."""

Subject = tuple[str, str | int]
"""What a decision is about: ("trajectory", key), ("gate", iteration), ("batch", step), ("worker", name) or ("steps", "steps")."""

NAMES = {
    "SetPriority": "priorities",
    "Prefer": "bucket preferences",
    "OpenGate": "gate openings",
    "OpenBatch": "batch openings",
    "OpenWave": "wave openings",
    "Turn": "turns of engines",
    "LoadVersion": "loads of versions",
    "Vacate": "engines that give their trajectories away",
    "TakeSteps": "choices of how steps are taken",
}
"""The name of each command, in the plural."""


_KINDS = {"OpenGate": "gate", "OpenBatch": "batch", "OpenWave": "batch", "TakeSteps": "steps"} | dict.fromkeys(
    ("Turn", "LoadVersion", "Vacate"), "worker"
)


def subject_of(command: Command) -> Subject:
    """The subject of a command."""
    kind = _KINDS.get(type(command).__name__, "trajectory")
    return kind, int(command.about) if kind in ("gate", "batch") else command.about


def subject_text(subject: Subject) -> str:
    """The subject in words."""
    kind, which = subject
    words = {"gate": f"iteration {which}", "batch": f"batch {which}"}
    return words.get(kind, str(which))


def concerns(event: Fact, subject: Subject, members: tuple[tuple[int, int], ...]) -> bool:
    """Whether an event belongs to the history of a subject; ``members`` are the groups of a batch."""
    kind, which = subject
    match event:
        case facts.RunStarted():
            return True
        case facts.GateParked(iteration=iteration) | facts.OpenGate(iteration=iteration):
            return kind == "gate" and iteration == which
        case facts.BatchParked(batch=batch) | facts.OpenBatch(batch=batch):
            return kind == "batch" and batch == which
        case facts.WaveParked(batch=batch) | facts.OpenWave(batch=batch) | facts.WaveTrained(batch=batch):
            return kind == "batch" and batch == which
        case facts.LateRewardsTaken(batch=batch):
            return kind == "batch" and batch == which
        case facts.VersionPublished():
            return kind in ("gate", "batch") and event.version <= int(which)
        case facts.Turn(worker=worker) | facts.TurnRefused(worker=worker) | facts.RoleChanged(worker=worker):
            return kind == "worker" and worker == which
        case facts.LoadVersion(worker=worker) | facts.VersionServed(worker=worker):
            return kind == "worker" and worker == which
        case facts.Vacate(worker=worker, keys=moved):
            return worker == which if kind == "worker" else kind == "trajectory" and which in moved
        case facts.GroupCommitted(split="train", iteration=iteration, group=group):
            return kind == "batch" and (iteration, group) in members
        case facts.StepsPlanned() | facts.StepMeasured() | facts.TakeSteps():
            return kind == "steps"
    return kind == "trajectory" and getattr(event, "key", None) == which


def event_text(fact: Fact) -> str:
    """One fact as a sentence, on one line."""
    return shown_line(facts.sentence(fact), MAX_EVENT_CHARS)


def forecast_results(told: Iterable[tuple[int, Fact]], key: str) -> dict[int, str]:
    """For each forecast of a trajectory's tokens, by its line: how many it generated from there to its end."""
    results, open_, tokens = dict[int, str](), dict[int, int](), 0
    for line, event in told:
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
