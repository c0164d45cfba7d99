"""Events of a run ``demo``, made by hand: their seconds are round, so that what follows from them can be counted."""

from typing import Any

from libra import facts
from libra.facts import Line
from libra.observe.timeline.timeline import Timeline
from libra.types import Phase

RUN = "demo"
KEY = "trajectory-train-0-0-{}-e0-demo"
CHECK: dict[str, Any] = {
    "method": "columns", "gap": 0.0, "tolerance": 0.0, "moved_nats": None, "layers": 1, "changed_layers": None,
    "smallest_change": 0.0, "measured": False, "check_s": 0.5,
}  # fmt: skip
CONSIDERED: dict[str, Any] = {
    "predicted_step_s": None, "realised_step_s": 10.0, "current_step_s": 10.0, "proposed_step_s": 8.0, "gain_s": 20.0,
    "cost_s": 1.0, "num_changes": 1, "remaining_iterations": 10,
    "train_gpus": 2, "engines": ((1, 2),), "reason": "gain exceeds cost",
}  # fmt: skip
"""Values of `PlanConsidered` apart from ``accepted``."""


def at(t_s: float, fact: facts.Fact) -> Line:
    return Line(RUN, t_s, fact)


def capacity(t_s: float, worker: str, rollout: int = 0, tool: int = 0) -> Line:
    return at(t_s, facts.WorkerCapacity(worker, "", rollout, tool))


def parked(t_s: float, key: object, phase: str = "ROLLOUT") -> Line:
    return at(t_s, facts.TrajectoryParked(KEY.format(key), 0, Phase(phase), 0))


def ranked(t_s: float, key: object, level: int) -> Line:
    return at(t_s, facts.SetPriority(KEY.format(key), facts.Priority(0, level, 0), ""))


def dispatched(t_s: float, key: object, worker: str, phase: str = "ROLLOUT") -> Line:
    return at(t_s, facts.QuantumDispatched(KEY.format(key), Phase(phase), worker, 0, (0, 0, 0), "", True))


def finished(t_s: float, key: object, worker: str, phase: str = "ROLLOUT", end: str = "") -> Line:
    finished = facts.QuantumFinished(KEY.format(key), Phase(phase), 5, "", "", 0.1, worker=worker, version=0, end=end)
    return at(t_s, finished)


def ended(t_s: float, key: object) -> Line:
    return at(t_s, facts.TrajectoryEnded(KEY.format(key), True))


def started(t_s: float = 0.0, epoch: int = 0, iterations: int = 2, group_size: int = 1) -> Line:
    return at(t_s, facts.RunStarted(epoch, 0, iterations, group_size, "fifo", ""))


def published(t_s: float, version: int) -> Line:
    return at(t_s, facts.VersionPublished(version, "d", 1))


def an_iteration() -> list[Line]:
    """One iteration of an engine, a tool worker and one training worker."""
    return [
        started(), capacity(0.0, "rollout-0", rollout=2), capacity(0.0, "tool-0", tool=1), published(9.0, 0),
        at(10.0, facts.VersionServed(0, "rollout-0", 0.0)), at(10.0, facts.GateParked(0)),
        at(10.0, facts.OpenGate(0, "")), at(10.0, facts.BatchParked(0)), parked(10.0, 0),
        dispatched(10.0, 0, "rollout-0"), finished(14.0, 0, "rollout-0"), parked(14.0, 0, "TOOL"),
        dispatched(14.0, 0, "tool-0", "TOOL"), finished(17.0, 0, "tool-0", "TOOL"), parked(17.0, 0),
        dispatched(18.0, 0, "rollout-0"), finished(20.0, 0, "rollout-0", end="answered"), ended(20.0, 0),
        at(21.0, facts.OpenBatch(0, ((0, 0),), "")), at(29.0, facts.StepFinished(0, 0.5, 6.0)), published(30.0, 1),
        at(32.0, facts.VersionServed(1, "rollout-0", 1.0)),
        at(32.0, facts.VersionChecked(1, "rollout-0", **CHECK, stopped_s=1.5)),
        at(40.0, facts.IterationFinished(0, 0.5, 0.0)),
    ]  # fmt: skip


def timeline_of(log, trainers=(), **options):
    timeline = Timeline(trainers, **options)
    for line in log:
        timeline.add(line)
    return timeline


def worker_times(log, trainers=()):
    return timeline_of(log, trainers).workers
