"""What happened in a run: past-tense events, one small frozen struct each, and their lines in the event log.

1. Every event has ``run`` (name) and ``t_s`` (wall seconds since the run started); its ``name`` is its class in snake case.
2. ``from_json(to_json(event)) == event``. Sequences are tuples; numbers are finite, and None means "not known".
3. Each line begins with ``schema``. An unknown schema, name, field or type is refused, never skipped.
4. The log has every event that the policy objects receive, in the order in which they receive it. Each command they answer is
   on that line or on one of its own right after it, so that `libra.policy.log_replay` can repeat the decisions.

Nothing here reads a clock or writes a file: the caller gives the time of an event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from libra.errors import StoreError
from libra.events.event import Event
from libra.events.roles import (
    EngineTurned,
    RoleChangeCancelled,
    RoleChanged,
    RoleChangeFailed,
    RoleChangeStarted,
    RoleMemberFailed,
    RoleMemberKnown,
    RoleRestored,
    RoleStage,
    TurnRefused,
)
from libra.events.runs import (
    BatchOpened,
    BatchParked,
    BoundariesSet,
    EvaluationFinished,
    GateOpened,
    GateParked,
    IterationFinished,
    LateRewardsTaken,
    LayoutPlanned,
    MismatchFound,
    PlanAccepted,
    PlanBlocked,
    PlanConsidered,
    PlanRealised,
    PolicyLearned,
    PolicySnapshot,
    PromptsNamed,
    RunStarted,
    StepFinished,
    StepMeasured,
    StepsChosen,
    StepsPlanned,
    ToolsDeclared,
    WaveOpened,
    WaveParked,
    WaveTrained,
)
from libra.events.trajectories import (
    ActionFinished,
    ActionRequested,
    BucketsPreferred,
    FailureClassified,
    GroupCommitted,
    GroupScored,
    HomeChanged,
    HomeForgotten,
    LeaseGranted,
    LeaseRevoked,
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
    EngineVacated,
    GangFormed,
    GangLost,
    ServiceAnswered,
    SlotsSet,
    StallDetected,
    ToolCapacity,
    ToolWorkersOrdered,
    VersionChecked,
    VersionOrdered,
    VersionPublished,
    VersionRechecked,
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
    "ActionFinished",
    "ActionRequested",
    "BatchOpened",
    "BatchParked",
    "BoundariesSet",
    "BucketsPreferred",
    "EngineDeclared",
    "EngineQuarantined",
    "EngineTurned",
    "EngineVacated",
    "EvaluationFinished",
    "Event",
    "FailureClassified",
    "GangFormed",
    "GangLost",
    "GateOpened",
    "GateParked",
    "GroupCommitted",
    "GroupScored",
    "HomeChanged",
    "HomeForgotten",
    "IterationFinished",
    "LateRewardsTaken",
    "LayoutPlanned",
    "LeaseGranted",
    "LeaseRevoked",
    "MismatchFound",
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
    "RoleMemberKnown",
    "RoleRestored",
    "RoleStage",
    "RunStarted",
    "ServiceAnswered",
    "SlotsSet",
    "StallDetected",
    "StepFinished",
    "StepMeasured",
    "StepsChosen",
    "StepsPlanned",
    "ToolCapacity",
    "ToolWorkersOrdered",
    "ToolsDeclared",
    "TrajectoryEnded",
    "TrajectoryFoundEnded",
    "TrajectoryParked",
    "TurnRefused",
    "VersionChecked",
    "VersionOrdered",
    "VersionPublished",
    "VersionRechecked",
    "VersionServed",
    "WaveOpened",
    "WaveParked",
    "WaveTrained",
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

EVENTS: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
"""Every kind of event by name."""

_HEAD = f'{{"schema":{SCHEMA},'


def _plain(value: Any) -> Any:
    """A number or word of a derived type (numpy's, for one) as the plain one; TypeError for other types."""
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} {value!r} has no form in JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def to_dict(event: Event) -> dict[str, Any]:
    """The event as one flat dict, ``schema`` and ``name`` first."""
    return {"schema": SCHEMA, **msgspec.to_builtins(event, enc_hook=_plain)}


def to_json(event: Event) -> str:
    """One line of JSON without its newline; StoreError if a value is NaN, infinite, or not JSON-able."""
    try:
        line = _encode(event)
    except (
        UnicodeEncodeError
    ):  # a lone surrogate, from a file name that is not UTF-8: only an ASCII escape can express it
        return json.dumps(to_dict(event), separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise StoreError(
            f"event {event.name}: {error}; allowed are None, bool, numbers, strings, lists and dicts"
        ) from error
    # msgspec writes NaN and infinity as null.
    if b"null" in line and (found := _not_finite(to_dict(event))):
        raise StoreError(f"event {event.name}: {found}; allowed are finite numbers: {event}")
    return _HEAD + line[1:].decode()


def _not_finite(value: object, where: str = "") -> str:
    """The first number within ``value`` that is NaN or infinite, with its place; empty if there is none."""
    if isinstance(value, float):
        return "" if isfinite(value) else f"{where} is {value}"
    if isinstance(value, dict):
        return next(filter(None, (_not_finite(each, str(name)) for name, each in value.items())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_finite(each, where) for each in value)), "")
    return ""


def from_dict(values: Mapping[str, Any]) -> Event:
    """The event of a dict; StoreError where schema, name or a field is unknown, or a field is missing or of another type."""
    if values.get("schema") != SCHEMA:
        raise StoreError(
            f"event of schema {values.get('schema')!r}, this Libra reads {SCHEMA}; use the Libra that wrote it"
        )
    kind = EVENTS.get(values.get("name", ""))
    if kind is None:
        raise StoreError(f"event named {values.get('name')!r}; known are {', '.join(EVENTS)}")
    try:
        return msgspec.convert({name: value for name, value in values.items() if name != "schema"}, kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(kind.__struct_fields__)
        raise StoreError(f"event {kind.name}: {error}; its fields are {fields}; use the Libra that wrote it") from error


def from_json(line: str) -> Event:
    """The event of one line; StoreError if the line is not JSON, or not an event."""
    try:
        values = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise StoreError(f"event line is not JSON ({error}): {line[:120]!r}") from error
    if not isinstance(values, dict):
        raise StoreError(f"event line is not a JSON object:  {line[:120]!r}")
    return from_dict(values)
