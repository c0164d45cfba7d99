"""Trajectories and groups."""

from __future__ import annotations

from libra.events.event import Event
from libra.types import Phase, tool_outcome


class TrajectoryParked(Event, frozen=True):
    """A trajectory waits for a slot of ``phase``, after ``quanta`` committed records, with this priority.

    ``context_tokens`` is its context so far, 0 if it has not run yet.
    ``priority`` and ``reason`` are the policy's answer, a ``SetPriority``; empty if it gave none.
    """

    key: str
    phase: Phase
    quanta: int
    context_tokens: int
    priority: tuple[int, ...]
    reason: str


class PrioritySet(Event, frozen=True):
    """A trajectory got another priority, as a result of the preceding line."""

    key: str
    priority: tuple[int, ...]
    reason: str


class BucketsPreferred(Event, frozen=True):
    """A trajectory may also take slots of these buckets, besides those of its home, as a result of the preceding line.

    Forecast: it generates ``left_tokens`` more, and reaches ``final_tokens`` of context; 0: no forecast. Without a home it
    should begin on engines of TP degree ``begins_tp``, according to a plan; 0: on any engine.
    """

    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int
    final_tokens: int
    begins_tp: int = 0


class PlacementVoid(Event, frozen=True):
    """A trajectory was placed, but its task had been cancelled; nothing was sent."""

    key: str
    phase: Phase


class HomeForgotten(Event, frozen=True):
    """A trajectory's next attempt need not go where the last one failed."""

    key: str


class TrajectoryEnded(Event, frozen=True):
    """A trajectory has ended, and the policy may forget it; ``completed``: by itself, and for the first time."""

    key: str
    completed: bool


class QuantumDispatched(Event, frozen=True):
    """A waiting trajectory got a slot of ``phase`` on ``worker``, for this reason.

    ``alone``: no other run was on the scheduler, so the log has all that the dispatcher knew.
    """

    key: str
    phase: Phase
    quantum: int
    worker: str
    priority: tuple[int, ...]
    reason: str
    alone: bool


class ActionRequested(Event, frozen=True):
    """A trajectory, which parks with the next line, needs what its calls of these tools take."""

    key: str
    tools: tuple[str, ...]


class LeaseGranted(Event, frozen=True):
    """The action that is placed with the next line holds these resources of ``worker``.

    ``at_s``: when they were granted, by the scheduler's clock; ``queued_s``: since it parked.
    """

    key: str
    worker: str
    at_s: float
    cores: int
    memory_bytes: int
    gpus: int
    queued_s: float


class LeaseRevoked(Event, frozen=True):
    """An action was stopped, after ``ran_s`` of which nothing is left, so that another one can begin; it is requested again.

    ``at_s``: by the clock of `LeaseGranted`. ``alone``: as of `QuantumDispatched`.
    """

    key: str
    worker: str
    at_s: float
    ran_s: float
    reason: str
    alone: bool


class ActionFinished(Event, frozen=True):
    """A leased action has ended: seconds that it waited for its lease, that its calls ran, and of everything around them.

    ``killed``: it took more than its memory.
    """

    key: str
    worker: str
    cores: int
    queued_s: float
    ran_s: float
    overhead_s: float
    killed: bool


class HomeChanged(Event, frozen=True):
    """A generation of a trajectory with ``tokens`` of context ran on ``worker`` instead of ``home``, whose engine had its KV.

    ``prefill_s`` and ``transfer_s`` were expected for computing the KV again (0: not known) and for sending it. ``sent``: it was
    to be sent, ``num_bytes`` of it arrived and were taken, and ``took_s`` is the transfer; where ``refused`` says why not, and
    where it was not to be sent, ``took_s`` is the time until the first token (0: the engine does not tell it, as vLLM).
    """

    key: str
    home: str
    worker: str
    tokens: int
    prefill_s: float
    transfer_s: float
    sent: bool
    took_s: float
    num_bytes: int
    refused: str


class QuantumFinished(Event, frozen=True):
    """A quantum's record is committed.

    ``tokens`` were generated, the oldest by weights ``version`` (-1: none); ``tool`` and ``status`` are those of an action,
    which appended ``payload_tokens``; ``status`` is empty (`libra.types.NO_TOOL`) if no tool returned. ``end`` is why the
    trajectory ended, empty if it continues; ``unfinished``: its turn goes on in its next quantum (`rollout.chunk_tokens`).
    ``latency_s`` is wall time on the worker, and ``tools_s`` how much of it a generation waited for tools that run inline.
    ValueError if ``status`` is not an outcome.
    """

    key: str
    phase: Phase
    quantum: int
    tokens: int
    tool: str
    status: str
    payload_tokens: int
    latency_s: float
    worker: str
    version: int
    end: str
    unfinished: bool = False
    tools_s: float = 0.0

    def __post_init__(self) -> None:
        tool_outcome(self.status)


class QuantumContinued(Event, frozen=True):
    """No trajectory waited for the slot, so this one began its next quantum in it without parking."""

    key: str
    phase: Phase
    quantum: int
    worker: str


class TrajectoryFoundEnded(Event, frozen=True):
    """A dispatched trajectory had ended before: its result had been lost, or the run was resumed.

    ``quanta``: its records; if they are gone because its group is committed, the number of its turns.
    """

    key: str
    quanta: int
    worker: str
    end: str


class QuantumLost(Event, frozen=True):
    """A quantum ended without a record, ``times`` times in a row now: its worker died, or it was cancelled."""

    key: str
    phase: Phase
    quantum: int
    address: str
    times: int


class QuantumGivenBack(Event, frozen=True):
    """A quantum ended without a record, and runs again: the worker's engine was put to sleep, or, for an action, its lease was
    revoked, or the worker had no place for another agent."""

    key: str
    phase: Phase
    quantum: int
    address: str


class GroupScored(Event, frozen=True):
    """The teacher (``distil.teacher``) has scored a training group; its scores are on disk. ``score_s``: seconds of the teacher;
    ``waited_s``: those in which the group waited for it, until its weights were there, and for others, also of the same batch."""

    iteration: int
    group: int
    score_s: float
    waited_s: float = 0.0


class GroupCommitted(Event, frozen=True):
    """The immutable record of a group exists.

    ``reward`` is the mean over samples that train, None if none does; ``oldest_version`` -1 if nothing was generated;
    ``failures`` counts its trajectories that ended as a failure, by class, ``resampled`` attempts that failed before those.
    """

    split: str
    iteration: int
    group: int
    oldest_version: int
    reward: float | None
    failures: dict[str, int]
    resampled: int = 0


class FailureClassified(Event, frozen=True):
    """A trajectory failed, with this failure class."""

    key: str
    failure: str
    detail: str
