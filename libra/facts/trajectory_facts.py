"""Trajectories and groups."""

from __future__ import annotations

from typing import Any

from libra.facts.fact import Fact, Signal
from libra.types import Phase, tool_outcome


class TrajectoryParked(Fact, frozen=True, gc=False):
    """A trajectory waits for a slot of ``phase``: for the first time (``quanta`` 0), or after a quantum was committed or lost.

    ``group`` is shared by the samples of one prompt, ``family`` by all trajectories of one environment; empty: unknown.
    ``context_tokens`` are those whose KV another engine would compute again; 0: not known.
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
    """A trajectory begins a quantum in a slot of ``phase`` on ``worker``; a generation makes this worker the holder of its KV."""

    key: str
    phase: Phase
    worker: str


class QuantumDispatched(QuantumStarted, frozen=True, gc=False):
    """A waiting trajectory got a slot, for this reason.

    ``alone``: no other run was on the scheduler, so the log has all that the dispatcher knew.
    """

    words = "quantum {quantum} gets a {phase} slot on {worker}, priority {priority}"

    quantum: int
    priority: tuple[int, ...]
    reason: str
    alone: bool


class QuantumContinued(QuantumStarted, frozen=True, gc=False):
    """No trajectory waited for the slot, so this one began its next quantum in it without parking."""

    words = "quantum {quantum} begins in the same {phase} slot on {worker}: no trajectory waited for it"

    quantum: int


class QuantumFinished(Fact, frozen=True, gc=False):
    """A quantum's record is committed: a generation, or an action.

    Attributes
    ----------
    tokens : int
        Generated; the oldest by weights ``version`` (-1: none).
    tool, status : str
        Of the calls that returned: an action's, or those that ran inline; ``status`` is empty (`libra.types.NO_TOOL`) if none
        did, and ``tool`` may be: a malformed call need not name any.
    latency_s : float
        Wall time on the worker, until ``stop_s`` (Unix time).
    payload_tokens : int
        Appended to the context by tools.
    tools_s : float
        Of a generation's ``latency_s``, how long its slot waited for tools.
    end : str
        Why the trajectory ended, empty if it goes on: with a quantum of phase ``next``, in the same slot if ``goes_on``.
    unfinished : bool
        Its turn goes on in its next quantum (`rollout.chunk_tokens`).
    calls : tuple of str
        Tools that its next action calls, if one of them has resources.
    ran_s : float
        Seconds of the longest of this action's calls. ``killed``: it took more than its memory.

    ValueError if ``status`` is not an outcome.
    """

    key: str
    phase: Phase
    tokens: int
    tool: str
    status: str
    latency_s: float
    payload_tokens: int = 0
    tools_s: float = 0.0
    quantum: int = 0
    worker: str = ""
    version: int = -1
    end: str = ""
    unfinished: bool = False
    next: str = ""
    goes_on: bool = False
    context_tokens: int = 0
    stop_s: float = 0.0
    calls: tuple[str, ...] = ()
    ran_s: float = 0.0
    killed: bool = False

    def __post_init__(self) -> None:
        tool_outcome(self.status)


class QuantumLost(Fact, frozen=True):
    """A quantum ended without a record, ``times`` times in a row now: its worker died, or it was cancelled."""

    words = "quantum {quantum} is lost with worker {address}, time {times} in a row"

    key: str
    phase: Phase
    quantum: int
    address: str
    times: int


class QuantumGivenBack(Fact, frozen=True):
    """A quantum ended without a record, and runs again: the worker's engine was put to sleep, or, for an action, its lease was
    revoked, or the worker had no place for another agent."""

    words = "quantum {quantum} is returned by {address}, which sleeps, stopped it or has no room"

    key: str
    phase: Phase
    quantum: int
    address: str


class GivenBack(Signal, frozen=True):
    """The worker's part of `QuantumGivenBack`; ``revoked``: its action was stopped, as its lease was revoked."""

    key: str
    revoked: bool = False


class PlacementVoid(Fact, frozen=True):
    """A trajectory was placed, but its task had been cancelled; nothing was sent."""

    key: str
    phase: Phase


class HomeForgotten(Fact, frozen=True, gc=False):
    """The KV of a trajectory is no longer needed: its last attempt there failed, and the next need not go there."""

    words = "{key} no longer has a home: its last attempt failed"

    key: str


class HomeChanged(Fact, frozen=True, gc=False):
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


class TrajectoryEnded(Fact, frozen=True, gc=False):
    """A trajectory has ended, and the policy may forget it.

    ``completed`` is false if it failed, was abandoned, or had completed before: nothing is learned from its length.
    """

    key: str
    completed: bool = True


class TrajectoryFoundEnded(Fact, frozen=True):
    """A dispatched trajectory had ended before: its result had been lost, or the run was resumed.

    ``quanta``: its records; if they are gone because its group is committed, the number of its turns.
    """

    key: str
    quanta: int
    worker: str
    end: str


class FailureClassified(Fact, frozen=True):
    """A trajectory failed, with this failure class."""

    words = "failure of class {failure}"

    key: str
    failure: str
    detail: str


# ---------------------------------------------------------------- actions with resources


class ActionRequested(Fact, frozen=True, gc=False):
    """A trajectory, which parks with the next line, needs what its calls of these tools take; one of them has resources."""

    key: str
    tools: tuple[str, ...]


class LeaseGranted(Fact, frozen=True):
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


class LeaseRevoked(Fact, frozen=True):
    """An action was stopped, after ``ran_s`` of which nothing is left, so that another one can begin; it is requested again.

    ``at_s``: by the clock of `LeaseGranted`. ``alone``: as of `QuantumDispatched`.
    """

    words = "the action of {key} stops on {worker} after {ran_s:.3g} s"

    key: str
    worker: str
    at_s: float
    ran_s: float
    reason: str
    alone: bool


class ActionFinished(Fact, frozen=True):
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


class ServiceAnswered(Fact, frozen=True):
    """A batch of ``service`` has ended on ``worker``, with ``requests`` of this run in it.

    ``waited_s``: of the oldest of them; ``restore_s``: until the weights were on the device and verified; ``ran_s``: its function,
    with what it waited for an API that refused calls. ``restored``: the weights were not there; ``evicted``: services that made
    room.
    """

    service: str
    worker: str
    requests: int
    waited_s: float
    restore_s: float
    ran_s: float
    restored: bool
    evicted: int


class SessionsUsed(Signal, frozen=True):
    """The pool of sessions of a worker has done so much since the last; fields as in `libra.envs.sessions.SessionCounts`."""

    made: int = 0
    reused: int = 0
    resets: int = 0
    replaced: int = 0
    expired: int = 0


# ---------------------------------------------------------------- groups


class GroupCommitted(Fact, frozen=True):
    """The immutable record of a group exists.

    ``reward`` is the mean over samples that train, None if none does; ``oldest_version`` -1 if nothing was generated;
    ``failures`` counts its trajectories that ended as a failure, by class, ``resampled`` attempts that failed before those.
    """

    words = "group {group} of iteration {iteration} ({split}) is committed, oldest version {oldest_version}"

    split: str
    iteration: int
    group: int
    oldest_version: int
    reward: float | None
    failures: dict[str, int]
    resampled: int = 0


class RowsKept(Signal, frozen=True):
    """A worker keeps the rows of a training group in memory: ``block`` says where (`libra.worker.batch_rows`)."""

    iteration: int
    group: int
    block: dict[str, Any]


class GroupScored(Fact, frozen=True):
    """The teacher (``distil.teacher``) has scored a training group; its scores are on disk. ``score_s``: seconds of the teacher;
    ``waited_s``: those in which the group waited for it, until its weights were there, and for others, also of the same batch."""

    iteration: int
    group: int
    score_s: float
    waited_s: float = 0.0
