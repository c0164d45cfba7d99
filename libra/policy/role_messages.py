"""What the machine of role changes is told (events, past tense) and what it answers (commands); see `libra.policy.role_changes`."""

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
    """Where a change is; `RESUPPLIED` is its end."""

    DRAINING = "draining"
    SLEEPING = "sleeping"
    TAKING_UP = "taking_up"
    RESUPPLIED = "resupplied"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A role, and of an engine its tensor-parallel degree; of the other roles how many GPUs the worker itself has."""

    role: Role
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.role} tp={self.tp}"


Moves = Mapping[str, tuple[Assignment, Assignment]]
"""From and to, by worker."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """Somebody wants workers, by name, in these assignments; those that have theirs already are left alone."""

    targets: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody wants a change undone that has not ended."""

    generation: int


@dataclass(frozen=True, slots=True)
class MemberAnnounced:
    """A worker that can change roles is there: a new one does what it was started for, ``base``; one that came back, nothing."""

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
    """What was asked for is not done."""

    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Give the worker nothing more."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Perform:
    """Tell the worker to do its part of a stage of its change to ``assignment``; its engine has the slots of ``slots_of`` then."""

    worker: str
    generation: int
    stage: Stage
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Supply:
    """The worker is in its role: give it work of it; an engine has the slots of ``slots_of``."""

    worker: str
    generation: int
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartMember:
    """The worker could not go back to what it had: start it anew; its assignment waits for its name."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker failed again after its restart; it is given nothing until it is started anew by somebody else."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportStarted:
    """A change has begun; ``undoes`` is the generation of the one that it undoes, None: it was asked for, or mends something."""

    generation: int
    moves: Moves
    reason: str
    undoes: int | None = None


@dataclass(frozen=True, slots=True)
class ReportUndone:
    """A change is over without effect: what it moved goes back."""

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
