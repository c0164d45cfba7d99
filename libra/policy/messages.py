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
    """A trajectory waits for a slot: for the first time (``quanta`` 0), or after a quantum was committed or lost.

    ``group`` is shared by the samples of one prompt, ``family`` by all trajectories of one environment; empty: unknown.
    """

    key: str
    iteration: int
    phase: Phase
    quanta: int
    group: str = ""
    family: str = ""


@dataclass(frozen=True, slots=True)
class QuantumFinished:
    """A quantum was committed: a generation of ``tokens`` tokens, or an action whose tool came back with ``status``.

    A generation whose tools ran inline names them too. ``payload_tokens`` are those that the tools put into the context.
    """

    key: str
    phase: Phase
    tokens: int
    tool: str
    status: str
    latency_s: float
    payload_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """A trajectory is over; the policy may forget it.

    ``completed`` is false where it failed or was given up: its length says nothing.
    """

    key: str
    completed: bool = True


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The weights changed: what was learned about lengths is of an older policy."""

    version: int


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


Event = TrajectoryParked | QuantumFinished | TrajectoryEnded | VersionPublished
Command = SetPriority | OpenGate | OpenBatch
