"""What happened to trajectories and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from libra.events.event import Event
from libra.types import ToolOutcome, tool_outcome


@dataclass(frozen=True, slots=True)
class TrajectoryParked(Event):
    """A trajectory waits for a slot of ``phase``, after ``quanta`` committed records, at this place in the order.

    ``context_tokens`` is its context so far, 0 where it has not run yet.
    ``priority`` and ``reason`` are the policy's answer, a ``SetPriority``; empty where it gave none.
    """

    name: ClassVar[str] = "trajectory_parked"
    key: str
    phase: str
    quanta: int
    context_tokens: int
    priority: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PrioritySet(Event):
    """A trajectory was given another place in the order, by what the line before told about another one, or about a quantum."""

    name: ClassVar[str] = "priority_set"
    key: str
    priority: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BucketsPreferred(Event):
    """A trajectory may take slots of these buckets beside those of its home, by what the line before told.

    It is believed to generate ``left_tokens`` more, and to reach ``final_tokens`` of context; 0: nothing is believed. Without a
    home it had best begin on engines of TP degree ``begins_tp``, as a plan means it; 0: anywhere.
    """

    name: ClassVar[str] = "buckets_preferred"
    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int
    final_tokens: int
    begins_tp: int = 0


@dataclass(frozen=True, slots=True)
class PlacementVoid(Event):
    """A trajectory was to be given a slot, but its task was cancelled; nothing was sent."""

    name: ClassVar[str] = "placement_void"
    key: str
    phase: str


@dataclass(frozen=True, slots=True)
class HomeForgotten(Event):
    """A trajectory's next attempt need not go where the last one failed."""

    name: ClassVar[str] = "home_forgotten"
    key: str


@dataclass(frozen=True, slots=True)
class TrajectoryEnded(Event):
    """A trajectory is over, and the policy may forget it; ``completed``: it came to an end of its own, for the first time."""

    name: ClassVar[str] = "trajectory_ended"
    key: str
    completed: bool


@dataclass(frozen=True, slots=True)
class QuantumDispatched(Event):
    """A waiting trajectory was given one slot of ``phase`` on ``worker``, for this reason.

    ``alone``: no other run was on the scheduler, so the log has all that the dispatcher knew.
    """

    name: ClassVar[str] = "quantum_dispatched"
    key: str
    phase: str
    quantum: int
    worker: str
    priority: tuple[int, ...]
    reason: str
    alone: bool


@dataclass(frozen=True, slots=True)
class QuantumFinished(Event):
    """A quantum's record is committed.

    ``tokens`` were generated, the oldest by weights ``version`` (-1: none); ``tool`` and ``status`` are those of an action,
    which appended ``payload_tokens``; ``status`` is empty (`libra.types.NO_TOOL`) where no tool came back. ``end`` says why the
    trajectory ended, empty where it goes on. ``latency_s`` is wall time on the worker. ValueError where ``status`` is no outcome.
    """

    name: ClassVar[str] = "quantum_finished"
    key: str
    phase: str
    quantum: int
    tokens: int
    tool: str
    status: ToolOutcome
    payload_tokens: int
    latency_s: float
    worker: str
    version: int
    end: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", tool_outcome(self.status))


@dataclass(frozen=True, slots=True)
class QuantumContinued(Event):
    """Nobody waited for the slot, so the trajectory began its next quantum in it at once, without parking."""

    name: ClassVar[str] = "quantum_continued"
    key: str
    phase: str
    quantum: int
    worker: str


@dataclass(frozen=True, slots=True)
class TrajectoryFoundEnded(Event):
    """A trajectory was dispatched, and its ``quanta`` records were all there: its result had been lost, or the run resumed."""

    name: ClassVar[str] = "trajectory_found_ended"
    key: str
    quanta: int
    worker: str
    end: str


@dataclass(frozen=True, slots=True)
class QuantumLost(Event):
    """A quantum ended without a record, ``times`` times in a row now: its worker died, or it was cancelled."""

    name: ClassVar[str] = "quantum_lost"
    key: str
    phase: str
    quantum: int
    address: str
    times: int


@dataclass(frozen=True, slots=True)
class QuantumGivenBack(Event):
    """A quantum ended without a record because the worker's engine was put to sleep: it runs elsewhere, and nothing failed."""

    name: ClassVar[str] = "quantum_given_back"
    key: str
    phase: str
    quantum: int
    address: str


@dataclass(frozen=True, slots=True)
class GroupCommitted(Event):
    """The immutable record of a group exists.

    ``reward`` is the mean over samples that train, None where none does; ``oldest_version`` -1 where nothing was generated;
    ``failures`` counts classes that were found while grading.
    """

    name: ClassVar[str] = "group_committed"
    split: str
    iteration: int
    group: int
    oldest_version: int
    reward: float | None
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class FailureClassified(Event):
    """It was decided whose fault a bad trajectory is."""

    name: ClassVar[str] = "failure_classified"
    key: str
    failure: str
    detail: str
