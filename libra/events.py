"""What happened in a run, as values: past-tense events, one small frozen dataclass each, and their JSON form.

1. Every event has ``run`` (name) and ``t_s`` (wall seconds since the run started); its ``name`` says which one it is.
2. ``from_json(to_json(event)) == event``. Sequences are tuples; numbers are finite, and None says "not known".
3. Each line carries ``schema``. An unknown schema, name or field is refused, never skipped.
4. Everything the policy objects are told is here, in the order they were told it, each command they answered is on that
   line or on one of its own right after it: `libra.policy.replay` takes the same decisions again from nothing else.

Nothing here reads a clock or writes a file: whoever emits an event says when it happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar

from libra.errors import StoreError

SCHEMA = 3
"""Layout of an event; a change that old code cannot read takes the next number."""

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)


def _one_shot() -> Callable[[Any], str]:
    """`JSONEncoder.encode` without making a C encoder for each event, which takes longer than most events do."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without the C accelerator
        return _encoder.encode
    text = json.encoder.encode_basestring_ascii
    encode = make(None, _encoder.default, text, None, ":", ",", False, False, False)
    return lambda values: "".join(encode(values, 0))


_encode = _one_shot()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened ``t_s`` seconds after the start of ``run``."""

    name: ClassVar[str] = ""
    run: str
    t_s: float


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """A driver took ``epoch`` of a run and begins; ``policy`` names what orders its trajectories, ``family`` their environment."""

    name: ClassVar[str] = "run_started"
    epoch: int
    eta: int
    iterations: int
    groups_per_batch: int
    policy: str
    family: str


@dataclass(frozen=True, slots=True)
class PolicySnapshot(Event):
    """What the policy objects know here: ``order`` of the one that ``policy`` names, and ``admission``.

    The first after ``run_started`` is what an epoch begins with; from any later one a replay can begin.
    """

    name: ClassVar[str] = "policy_snapshot"
    policy: str
    family: str
    order: dict[str, Any]
    admission: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GateParked(Event):
    """An iteration asks to begin."""

    name: ClassVar[str] = "gate_parked"
    iteration: int


@dataclass(frozen=True, slots=True)
class GateOpened(Event):
    """An iteration may generate, for this reason."""

    name: ClassVar[str] = "gate_opened"
    iteration: int
    reason: str


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

    It is believed to generate ``left_tokens`` more, and to reach ``final_tokens`` of context; 0: nothing is believed.
    """

    name: ClassVar[str] = "buckets_preferred"
    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int
    final_tokens: int


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
class PolicyLearned(Event):
    """The policy did the dear part of its learning from what had finished, which took ``seconds`` of the scheduler's loop."""

    name: ClassVar[str] = "policy_learned"
    seconds: float


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
    which appended ``payload_tokens``. ``end`` says why the trajectory ended, empty where it goes on. ``latency_s`` is wall
    time on the worker.
    """

    name: ClassVar[str] = "quantum_finished"
    key: str
    phase: str
    quantum: int
    tokens: int
    tool: str
    status: str
    payload_tokens: int
    latency_s: float
    worker: str
    version: int
    end: str


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
class BatchParked(Event):
    """A step asks for its groups."""

    name: ClassVar[str] = "batch_parked"
    batch: int


@dataclass(frozen=True, slots=True)
class BatchOpened(Event):
    """A step may train on these groups, each (iteration, group), for this reason."""

    name: ClassVar[str] = "batch_opened"
    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """All ranks took step ``step``."""

    name: ClassVar[str] = "step_finished"
    step: int
    loss: float
    train_s: float


@dataclass(frozen=True, slots=True)
class VersionPublished(Event):
    """Weights ``version`` are in the registry, with their content hash."""

    name: ClassVar[str] = "version_published"
    version: int
    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class VersionServed(Event):
    """The engine of ``worker`` generates with ``version`` from now on.

    ``bucket`` is its capacity class: engines of one kind, tensor-parallel degree and number of threads have the same.
    ``stats`` is what the engine has done since it started: tokens generated, prefilled and reused, steps, busy seconds, and how
    often its process was replaced.
    """

    name: ClassVar[str] = "version_served"
    version: int
    worker: str
    load_s: float
    tp: int = 1
    bucket: str = ""
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionChecked(Event):
    """The engine of ``worker`` showed that it holds ``version``, before the version counted as served.

    ``method`` is the comparison that tells the version from what the engine held before (columns, probe, projections), with
    its ``gap`` and ``tolerance``; ``moved_nats`` is the median change of the probe's log-probabilities since the version
    before. ``layers`` were compared; of ``changed_layers`` a changed column was read. ``smallest_change`` of one layer would
    have been noticed: 0 is one bit, else relative to the layer's root mean square, of a probe in nats. ``measured``: the
    tolerance was measured at version 0. ``check_s`` is wall time beside the loading, of which the last ``stopped_s`` (with the
    loading) passed before a turn could begin. `libra.weights.verify` has the rules.
    """

    name: ClassVar[str] = "version_checked"
    version: int
    worker: str
    method: str
    gap: float
    tolerance: float
    moved_nats: float | None
    layers: int
    changed_layers: int | None
    smallest_change: float
    measured: bool
    check_s: float
    stopped_s: float


@dataclass(frozen=True, slots=True)
class EngineQuarantined(Event):
    """The engine of ``worker`` does not hold ``version``: it is given no trajectory until another check passes.

    ``layer`` disagrees by ``gap`` (None: it gave no number), allowed was ``tolerance``, both in the unit of ``method``.
    ``out``: an engine started from the version's own file disagrees too, and stays out for the rest of this start.
    """

    name: ClassVar[str] = "engine_quarantined"
    version: int
    worker: str
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str
    out: bool


@dataclass(frozen=True, slots=True)
class IterationFinished(Event):
    """The summary of an iteration returned; ``reward`` is None where no trajectory had one."""

    name: ClassVar[str] = "iteration_finished"
    iteration: int
    reward: float | None
    lag: float


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A Dask worker came."""

    name: ClassVar[str] = "worker_joined"
    worker: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerCapacity(Event):
    """What the policy knows of a worker from now on; the fields are those of `libra.policy.messages.WorkerJoined`."""

    name: ClassVar[str] = "worker_capacity"
    worker: str
    bucket: str
    rollout_slots: int
    tool_slots: int
    kv_tokens: int
    token_s: float
    token_full_s: float
    prefill_token_s: float


@dataclass(frozen=True, slots=True)
class WorkerWithdrawn(Event):
    """A worker takes nothing more: it has left, or is about to."""

    name: ClassVar[str] = "worker_withdrawn"
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A Dask worker left; each quantum it took along has its own ``quantum_lost``."""

    name: ClassVar[str] = "worker_lost"
    address: str


@dataclass(frozen=True, slots=True)
class FailureClassified(Event):
    """It was decided whose fault a bad trajectory is."""

    name: ClassVar[str] = "failure_classified"
    key: str
    failure: str
    detail: str


@dataclass(frozen=True, slots=True)
class StallDetected(Event):
    """Nothing of the run made progress for ``idle_s``.

    ``key`` has been on ``worker`` the longest, in ``stage``; all three are empty where nothing runs, and ``detail`` says
    what is waited for. ``parked`` tasks wait. ``last_event`` is the last line before. ``stacks`` is the file, within the run
    directory, that says where the worker's threads and coroutines are. ``restarts``: the worker is
    restarted for it, unless the run goes on in the meantime.
    """

    name: ClassVar[str] = "stall_detected"
    key: str
    worker: str
    address: str
    stage: str
    idle_s: float
    parked: int
    detail: str
    last_event: str
    stacks: str
    restarts: bool


@dataclass(frozen=True, slots=True)
class PlanConsidered(Event):
    """A plan was weighed against what runs after an iteration, accepted or not, for this reason.

    Steps are predicted by the same model, corrected by ``rollout_factor`` and ``training_factor``, which predicted
    ``predicted_step_s`` for the iteration that took ``realised_step_s``. ``gain_s`` is over ``remaining_iterations``;
    ``cost_s`` the mean of ``num_changes`` measured changes, assumed where there was none. ``engines`` are (TP degree, number).
    """

    name: ClassVar[str] = "plan_considered"
    iteration: int
    predicted_step_s: float
    realised_step_s: float
    current_step_s: float
    proposed_step_s: float
    gain_s: float
    cost_s: float
    num_changes: int
    remaining_iterations: int
    required_gain_frac: float
    rollout_factor: float
    training_factor: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PlanAccepted(Event):
    """The plan considered in the line before is to be carried out by ``commands``, each (name, numbers in words)."""

    name: ClassVar[str] = "plan_accepted"
    iteration: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    concurrency: tuple[tuple[int, int], ...]
    commands: tuple[tuple[str, str], ...]


_KINDS: tuple[type[Event], ...] = (
    RunStarted,
    PolicySnapshot,
    GateParked,
    GateOpened,
    TrajectoryParked,
    PrioritySet,
    BucketsPreferred,
    PlacementVoid,
    HomeForgotten,
    PolicyLearned,
    TrajectoryEnded,
    QuantumDispatched,
    QuantumFinished,
    QuantumContinued,
    TrajectoryFoundEnded,
    QuantumLost,
    GroupCommitted,
    BatchParked,
    BatchOpened,
    StepFinished,
    VersionPublished,
    VersionServed,
    VersionChecked,
    EngineQuarantined,
    IterationFinished,
    WorkerJoined,
    WorkerCapacity,
    WorkerWithdrawn,
    WorkerLost,
    FailureClassified,
    StallDetected,
    PlanConsidered,
    PlanAccepted,
)
EVENTS: dict[str, type[Event]] = {event.name: event for event in _KINDS}
"""Every kind of event by name."""

_FIELDS = {event: tuple(f.name for f in fields(event)) for event in EVENTS.values()}
_VALUES: dict[type[Event], Callable[[Any], tuple[Any, ...]]] = {e: attrgetter(*names) for e, names in _FIELDS.items()}


def to_dict(event: Event) -> dict[str, Any]:
    """The event as one flat dict, ``schema`` and ``name`` first."""
    kind = type(event)
    values = {"schema": SCHEMA, "name": kind.name}
    values.update(zip(_FIELDS[kind], _VALUES[kind](event), strict=True))
    return values


def to_json(event: Event | Mapping[str, Any]) -> str:
    """One line of JSON without its newline; StoreError where a value is NaN, infinite, or not JSON-able."""
    # Not by isinstance first: asking an abstract class costs a fifth of the line, and the hot path gives a dict.
    values = event if type(event) is dict or isinstance(event, Mapping) else to_dict(event)
    try:
        return _encode(values)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"event {values.get('name')!r}: {error}; allowed are None, bool, finite numbers, strings, lists and dicts: "
            f"{values}"
        ) from error


def from_dict(values: Mapping[str, Any]) -> Event:
    """The event that a dict describes; StoreError where schema, name or a field is unknown, or a field is missing."""
    if values.get("schema") != SCHEMA:
        raise StoreError(
            f"event of schema {values.get('schema')!r}, this Libra reads {SCHEMA}; use the Libra that wrote it"
        )
    kind = EVENTS.get(values.get("name", ""))
    if kind is None:
        raise StoreError(f"event named {values.get('name')!r}; known are {', '.join(EVENTS)}")
    try:
        return kind(**{name: _frozen(value) for name, value in values.items() if name not in ("schema", "name")})
    except TypeError as error:
        raise StoreError(f"event {kind.name}: {error}; its fields are {', '.join(_FIELDS[kind])}") from error


def from_json(line: str) -> Event:
    """The event one line holds; StoreError where the line is not JSON, or not an event."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise StoreError(f"event line is not JSON ({error}): {line[:120]!r}") from error
    if not isinstance(values, dict):
        raise StoreError(f"event line is no JSON object: {line[:120]!r}")
    return from_dict(values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
