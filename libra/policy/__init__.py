"""Decisions, and nothing else: events in, commands out. No clock, no I/O, no Dask; the live plugin and the simulator share it."""

from __future__ import annotations

from libra.policy.admission import Admission, CommittedGroup
from libra.policy.fifo import Fifo
from libra.policy.forecast import Forecast, Forecaster
from libra.policy.messages import (
    Command,
    Event,
    OpenBatch,
    OpenGate,
    Priority,
    QuantumFinished,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
)
from libra.policy.ordering import ORDERINGS, Ordering
from libra.policy.staleness import Capacity, Consumption, StalenessLedger

__all__ = [
    "ORDERINGS",
    "Admission",
    "Capacity",
    "Command",
    "CommittedGroup",
    "Consumption",
    "Event",
    "Fifo",
    "Forecast",
    "Forecaster",
    "OpenBatch",
    "OpenGate",
    "Ordering",
    "Priority",
    "QuantumFinished",
    "SetPriority",
    "StalenessLedger",
    "TrajectoryEnded",
    "TrajectoryParked",
    "VersionPublished",
]
