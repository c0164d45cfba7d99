"""Events and commands of the state machine for role changes; see `libra.policy.role_changes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a worker does with its GPUs; ``lent``: they belong to the engine of another worker of its node."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    LENT = "lent"


class Stage(StrEnum):
    """Stage of a change; `RESUPPLIED` is the last."""

    DRAINING = "draining"
    SLEEPING = "sleeping"
    TAKING_UP = "taking_up"
    RESUPPLIED = "resupplied"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A role; for an engine its tensor-parallel degree, for other roles the number of GPUs that the worker itself has."""

    role: Role
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.role} tp={self.tp}"


Moves = Mapping[str, tuple[Assignment, Assignment]]
"""Old and new assignment, by worker."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """These assignments are wanted, by worker name; workers that have theirs already stay as they are."""

    targets: Mapping[str, Assignment]
    reason: str = "asked for"


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A client requests that a change which has not ended be undone."""

    generation: int


@dataclass(frozen=True, slots=True)
class MemberAnnounced:
    """A worker that can change roles has joined: a new worker has the role it was started for, ``base``; a worker that
    returned has none."""

    worker: str
    base: Assignment
    node: str = ""


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A worker has left the cluster."""

    worker: str


@dataclass(frozen=True, slots=True)
class StageDone:
    """A worker has finished its part of a stage."""

    worker: str
    generation: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """A worker could not do its part, or cannot go on in the role that ``generation`` gave it."""

    worker: str
    generation: int
    detail: str


RoleEvent = ChangeRequested | CancelRequested | MemberAnnounced | MemberLost | StageDone | MemberFailed


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Send the worker no more tasks."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Perform:
    """Make the worker perform a stage of its change to ``assignment``, after which its engine has the slots of
    ``slots_of``."""

    worker: str
    generation: int
    stage: Stage
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Supply:
    """The worker is in its role and takes tasks; an engine has the slots of ``slots_of``."""

    worker: str
    generation: int
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartMember:
    """The worker could not return to its old assignment: restart it; its assignment stays with its name."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker failed again after its restart; it gets no work until an operator restarts it."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportStarted:
    """A change has begun; ``undoes`` is the generation of the one that it undoes, None: it was requested, or repairs a failure."""

    generation: int
    moves: Moves
    reason: str
    undoes: int | None = None


@dataclass(frozen=True, slots=True)
class ReportUndone:
    """A change has ended without effect; its members return to their old assignments."""

    generation: int
    cancelled: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ReportEnded:
    """A change has ended and its members are in their assignments."""

    generation: int
    moves: Moves
    undoes: int | None


RoleCommand = Refuse | Withdraw | Perform | Supply | RestartMember | GiveUp | ReportStarted | ReportUndone | ReportEnded
