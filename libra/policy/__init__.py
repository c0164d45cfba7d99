"""Decisions as pure functions: events in, commands out. No clock, no I/O, no Dask; the live plugin and the simulator share it."""

from __future__ import annotations

from libra.policy.admission import Admission, CommittedGroup
from libra.policy.attained_service import CompletedCalls, Mlfq
from libra.policy.cmlfq import CMLFQ, Oracle, Predictor
from libra.policy.declared_capacity import joined_of, off_by_frac
from libra.policy.dispatcher import Dispatcher
from libra.policy.fifo import Fifo
from libra.policy.forecast import Forecast, Forecaster
from libra.policy.messages import (
    BoundariesSet,
    Command,
    Event,
    GroupsNamed,
    HomeForgotten,
    KVTransferred,
    LoadVersion,
    Move,
    OpenBatch,
    OpenGate,
    OpenWave,
    Place,
    Prefer,
    Priority,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    Vacate,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
    boundaries_of,
    groups_named,
)
from libra.policy.one_version import OneVersion
from libra.policy.oracle_lengths import KnownLengths
from libra.policy.ordering import (
    LEARNS_EVERY,
    ORDERINGS,
    Inspectable,
    OnlineLearner,
    Ordering,
    learns_after,
    make_ordering,
)
from libra.policy.paper_rule import PaperRule
from libra.policy.staleness import StalenessPolicy, Verdict, judge, keeps_version, staleness_of
from libra.policy.tail import Tail, TailSettings
from libra.policy.turning import Turn
from libra.policy.waves import Waves
from libra.policy.way_choice import MeasuredStep, TakeSteps, WayChoice, WaySettings

__all__ = [
    "CMLFQ",
    "LEARNS_EVERY",
    "ORDERINGS",
    "Admission",
    "BoundariesSet",
    "Command",
    "CommittedGroup",
    "CompletedCalls",
    "Dispatcher",
    "Event",
    "Fifo",
    "Forecast",
    "Forecaster",
    "GroupsNamed",
    "HomeForgotten",
    "Inspectable",
    "KVTransferred",
    "KnownLengths",
    "LoadVersion",
    "MeasuredStep",
    "Mlfq",
    "Move",
    "OneVersion",
    "OnlineLearner",
    "OpenBatch",
    "OpenGate",
    "OpenWave",
    "Oracle",
    "Ordering",
    "PaperRule",
    "Place",
    "Predictor",
    "Prefer",
    "Priority",
    "QuantumFinished",
    "QuantumStarted",
    "SetPriority",
    "StalenessPolicy",
    "Tail",
    "TailSettings",
    "TakeSteps",
    "TrajectoryEnded",
    "TrajectoryParked",
    "Turn",
    "Vacate",
    "Verdict",
    "VersionPublished",
    "Waves",
    "WayChoice",
    "WaySettings",
    "WorkerJoined",
    "WorkerLeft",
    "boundaries_of",
    "groups_named",
    "joined_of",
    "judge",
    "keeps_version",
    "learns_after",
    "make_ordering",
    "off_by_frac",
    "staleness_of",
]
