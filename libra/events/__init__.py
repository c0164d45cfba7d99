"""What happened in a run, as values: past-tense events, one small frozen dataclass each, and their JSON form.

1. Every event has ``run`` (name) and ``t_s`` (wall seconds since the run started); its ``name`` says which one it is.
2. ``from_json(to_json(event)) == event``. Sequences are tuples; numbers are finite, and None says "not known".
3. Each line carries ``schema``. An unknown schema, name or field is refused, never skipped.
4. Everything the policy objects are told is here, in the order they were told it, each command they answered is on that
   line or on one of its own right after it: `libra.policy.log_replay` takes the same decisions again from nothing else.

Nothing here reads a clock or writes a file: whoever emits an event says when it happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from libra.errors import StoreError
from libra.events.event import Event
from libra.events.roles import (
    RoleChangeCancelled,
    RoleChanged,
    RoleChangeFailed,
    RoleChangeStarted,
    RoleMemberFailed,
    RoleRestored,
    RoleStage,
)
from libra.events.runs import (
    BatchOpened,
    BatchParked,
    BoundariesSet,
    GateOpened,
    GateParked,
    IterationFinished,
    LayoutPlanned,
    PlanAccepted,
    PlanBlocked,
    PlanConsidered,
    PlanRealised,
    PolicyLearned,
    PolicySnapshot,
    PromptsNamed,
    RunStarted,
    StepFinished,
)
from libra.events.trajectories import (
    BucketsPreferred,
    FailureClassified,
    GroupCommitted,
    HomeForgotten,
    PlacementVoid,
    PrioritySet,
    QuantumContinued,
    QuantumDispatched,
    QuantumFinished,
    QuantumGivenBack,
    QuantumLost,
    TrajectoryEnded,
    TrajectoryFoundEnded,
    TrajectoryParked,
)
from libra.events.workers import (
    EngineDeclared,
    EngineQuarantined,
    GangFormed,
    GangLost,
    SlotsSet,
    StallDetected,
    VersionChecked,
    VersionPublished,
    VersionServed,
    WorkerCapacity,
    WorkerJoined,
    WorkerLost,
    WorkerSetupFailed,
    WorkerWithdrawn,
)

__all__ = [
    "EVENTS",
    "SCHEMA",
    "BatchOpened",
    "BatchParked",
    "BoundariesSet",
    "BucketsPreferred",
    "EngineDeclared",
    "EngineQuarantined",
    "Event",
    "FailureClassified",
    "GangFormed",
    "GangLost",
    "GateOpened",
    "GateParked",
    "GroupCommitted",
    "HomeForgotten",
    "IterationFinished",
    "LayoutPlanned",
    "PlacementVoid",
    "PlanAccepted",
    "PlanBlocked",
    "PlanConsidered",
    "PlanRealised",
    "PolicyLearned",
    "PolicySnapshot",
    "PrioritySet",
    "PromptsNamed",
    "QuantumContinued",
    "QuantumDispatched",
    "QuantumFinished",
    "QuantumGivenBack",
    "QuantumLost",
    "RoleChangeCancelled",
    "RoleChangeFailed",
    "RoleChangeStarted",
    "RoleChanged",
    "RoleMemberFailed",
    "RoleRestored",
    "RoleStage",
    "RunStarted",
    "SlotsSet",
    "StallDetected",
    "StepFinished",
    "TrajectoryEnded",
    "TrajectoryFoundEnded",
    "TrajectoryParked",
    "VersionChecked",
    "VersionPublished",
    "VersionServed",
    "WorkerCapacity",
    "WorkerJoined",
    "WorkerLost",
    "WorkerSetupFailed",
    "WorkerWithdrawn",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]

SCHEMA = 4
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

_KINDS: tuple[type[Event], ...] = (
    BoundariesSet,
    RunStarted,
    PolicySnapshot,
    GateParked,
    GateOpened,
    TrajectoryParked,
    PrioritySet,
    PromptsNamed,
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
    QuantumGivenBack,
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
    WorkerSetupFailed,
    EngineDeclared,
    SlotsSet,
    WorkerCapacity,
    WorkerWithdrawn,
    WorkerLost,
    GangFormed,
    GangLost,
    RoleChangeStarted,
    RoleStage,
    RoleChanged,
    RoleRestored,
    RoleChangeFailed,
    RoleChangeCancelled,
    RoleMemberFailed,
    FailureClassified,
    StallDetected,
    LayoutPlanned,
    PlanConsidered,
    PlanAccepted,
    PlanBlocked,
    PlanRealised,
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
    """The event that a dict describes; StoreError where schema, name or a field is unknown, a field is missing, or says a word that
    it cannot say.
    """
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
    except ValueError as error:
        raise StoreError(f"event {kind.name}: {error}; use the Libra that wrote it") from error


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
