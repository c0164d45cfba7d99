"""Trajectories and groups."""

from __future__ import annotations

from typing import Any

from libra.facts.fact import Fact, Signal
from libra.types import Phase, tool_outcome


class TrajectoryParked(Fact, frozen=True, gc=False):
    """A trajectory waits for a slot of ``phase``: at first, or after a committed or lost quantum.

    ``group`` is shared by the samples of one prompt, ``family`` by one environment; empty if
    unknown. ``context_tokens``: KV that another engine would have to compute again; 0 if unknown.
    """

    words = "{key} waits for {phase} after {quanta} quanta"
    key: str
    iteration: int
    phase: Phase
    quanta: int
    group: str = ""
    family: str = ""
    context_tokens: int = 0


class QuantumStarted(Fact, frozen=True, gc=False):
    """A trajectory begins a quantum on ``worker``, which holds its KV after a generation."""

    key: str
    phase: Phase
    worker: str


class QuantumDispatched(QuantumStarted, frozen=True, gc=False):
    """A waiting trajectory got a slot; ``alone``: no other run was on the scheduler."""

    words = "quantum {quantum} gets a {phase} slot on {worker}, priority {priority}"
    quantum: int
    priority: tuple[int, ...]
    reason: str
    alone: bool


class QuantumContinued(QuantumStarted, frozen=True, gc=False):
    """No other trajectory waited for the slot, so this trajectory begins its next quantum in it."""

    words = "quantum {quantum} begins in the same {phase} slot on {worker}: no trajectory waited for it"
    quantum: int


class QuantumFinished(Fact, frozen=True, gc=False):
    """The record of a generation or an action is committed.

    ValueError if ``status`` is not an outcome of `libra.types`.
    """

    key: str
    phase: Phase
    tokens: int  # generated
    tool: str  # of the calls that returned, inline ones too
    status: str  # empty (`libra.types.NO_TOOL`) if no call returned
    latency_s: float  # wall time on the worker, until ``stop_s``
    payload_tokens: int = 0  # appended to the context by tools
    tools_s: float = 0.0  # of a generation's ``latency_s``, its wait for tools
    quantum: int = 0
    worker: str = ""
    version: int = -1  # oldest version of the tokens
    end: str = ""  # why the trajectory ended; empty: it goes on with phase ``next``
    unfinished: bool = False  # its turn goes on in the next quantum (`rollout.chunk_tokens`)
    next: str = ""
    goes_on: bool = False  # in the same slot
    context_tokens: int = 0
    stop_s: float = 0.0  # Unix time
    calls: tuple[str, ...] = ()  # tools of its next action, if one has resources
    ran_s: float = 0.0  # longest call of this action
    killed: bool = False  # it took more than its memory

    def __post_init__(self) -> None:
        tool_outcome(self.status)


class QuantumLost(Fact, frozen=True):
    """A quantum ended without a record: its worker died, or it was cancelled."""

    words = "quantum {quantum} is lost with worker {address}, time {times} in a row"
    key: str
    phase: Phase
    quantum: int
    address: str
    times: int


class QuantumGivenBack(Fact, frozen=True):
    """A quantum ended without a record and runs again: engine asleep, lease revoked, or no room."""

    words = "quantum {quantum} is returned by {address}, which sleeps, stopped it or has no room"
    key: str
    phase: Phase
    quantum: int
    address: str


class GivenBack(Signal, frozen=True):
    """The worker's part of `QuantumGivenBack`; ``revoked``: the action's lease was revoked."""

    key: str
    revoked: bool = False


class PlacementVoid(Fact, frozen=True):
    """A trajectory was placed, but its task had been cancelled; nothing was sent."""

    key: str
    phase: Phase


class HomeForgotten(Fact, frozen=True, gc=False):
    """A trajectory no longer needs its KV: its last attempt there failed."""

    words = "{key} no longer has a home: its last attempt failed"
    key: str


class HomeChanged(Fact, frozen=True, gc=False):
    """A generation ran on ``worker`` instead of ``home``, whose engine had its KV."""

    key: str
    home: str
    worker: str
    tokens: int  # of context
    prefill_s: float  # expected for computing it again; 0: not known
    transfer_s: float  # expected for sending it
    sent: bool
    took_s: float  # of the transfer, else until the first token; 0: the engine does not report it
    num_bytes: int  # that arrived
    refused: str  # why it was not taken


class TrajectoryEnded(Fact, frozen=True, gc=False):
    """A trajectory has ended, and the policy may forget it.

    ``completed`` is false (its length does not count) if failed, abandoned or completed before.
    """

    key: str
    completed: bool = True


class TrajectoryFoundEnded(Fact, frozen=True):
    """A dispatched trajectory had ended before: its result was lost, or the run was resumed.

    ``quanta``: its records, or the number of its turns if its group is committed.
    """

    key: str
    quanta: int
    worker: str
    end: str


class FailureClassified(Fact, frozen=True):
    words = "failure of class {failure}"
    key: str
    failure: str
    detail: str


# ---------------------------------------------------------------- actions with resources


class ActionRequested(Fact, frozen=True, gc=False):
    """A trajectory, which parks with the next line, will call these tools, some with resources."""

    key: str
    tools: tuple[str, ...]


class LeaseGranted(Fact, frozen=True):
    """The action that the next line places holds these resources of ``worker``."""

    key: str
    worker: str
    at_s: float  # by the scheduler's clock
    cores: int
    memory_bytes: int
    gpus: int
    queued_s: float  # since it parked


class LeaseRevoked(Fact, frozen=True):
    """An action was stopped after ``ran_s`` in favour of another, and is requested again."""

    words = "the action of {key} stops on {worker} after {ran_s:.3g} s"
    key: str
    worker: str
    at_s: float
    ran_s: float
    reason: str
    alone: bool


class ActionFinished(Fact, frozen=True):
    """A leased action has ended; ``overhead_s`` is neither waiting nor running."""

    key: str
    worker: str
    cores: int
    queued_s: float
    ran_s: float
    overhead_s: float
    killed: bool


class ServiceAnswered(Fact, frozen=True):
    """A batch of ``service`` with ``requests`` of this run has ended on ``worker``."""

    service: str
    worker: str
    requests: int
    waited_s: float  # of the oldest request
    restore_s: float  # until the weights were on the device and verified
    ran_s: float  # with waits for an API that refused calls
    restored: bool  # the weights were not on the device
    evicted: int  # services that made room


class SessionsUsed(Signal, frozen=True):
    """Work of a worker's session pool since the last report (`SessionCounts`)."""

    made: int = 0
    reused: int = 0
    resets: int = 0
    replaced: int = 0
    expired: int = 0


# ---------------------------------------------------------------- groups


class GroupCommitted(Fact, frozen=True):
    """The immutable record of a group exists."""

    words = "group {group} of iteration {iteration} ({split}) is committed, oldest version {oldest_version}"
    split: str
    iteration: int
    group: int
    oldest_version: int  # -1 if nothing was generated
    reward: float | None  # mean over samples that train; None if none does
    failures: dict[str, int]  # trajectories that ended as a failure, by class
    resampled: int = 0  # attempts that failed before


class RowsKept(Signal, frozen=True):
    """A worker keeps the rows of a group in memory, at ``block`` (`worker.training.batch_rows`)."""

    iteration: int
    group: int
    block: dict[str, Any]


class GroupScored(Fact, frozen=True):
    """The teacher (``distil.teacher``) has scored a training group; its scores are on disk."""

    iteration: int
    group: int
    score_s: float
    waited_s: float = 0.0  # for the teacher's weights, and for other groups
