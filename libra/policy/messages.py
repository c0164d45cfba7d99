"""What a policy is told (events, past tense) and what it answers (commands, imperative, each with its reason)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from libra.types import Phase


class Priority(NamedTuple):
    """Order of parked tasks, compared left to right, smaller first. It is what ``ts.priority`` holds in the scheduler."""

    deadline: int  # iteration that must not wait for later ones
    level: int  # MLFQ level, 0 first
    order: int  # within a level


@dataclass(frozen=True, slots=True)
class TrajectoryParked:
    """A trajectory waits for a slot: for the first time (``quanta`` 0), or after a quantum was committed or lost."""

    key: str
    iteration: int
    phase: Phase
    quanta: int


@dataclass(frozen=True, slots=True)
class QuantumFinished:
    """A quantum was committed: a generation of ``tokens`` tokens, or an action whose tool came back with ``status``."""

    key: str
    phase: Phase
    tokens: int
    tool: str
    status: str
    latency_s: float


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """A trajectory is over; the policy may forget it."""

    key: str


@dataclass(frozen=True, slots=True)
class SetPriority:
    """Give a parked trajectory this place in the order."""

    key: str
    priority: Priority
    reason: str


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Let iteration ``iteration`` begin."""

    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """Let step ``batch`` train on these groups, given as (iteration, group)."""

    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


Event = TrajectoryParked | QuantumFinished | TrajectoryEnded
Command = SetPriority | OpenGate | OpenBatch
