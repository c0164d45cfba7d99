"""What happened to the roles of workers; see `libra.policy.role_changes` for stages and generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from libra.events.event import Event


@dataclass(frozen=True, slots=True)
class RoleChangeStarted(Event):
    """Workers are on their way to other roles: ``assignments`` has ``role`` and ``tp`` by worker.

    ``undoes`` is the generation of a change that was given up; None: it was asked for, or takes up what a worker is to have.
    """

    name: ClassVar[str] = "role_change_started"
    generation: int
    assignments: dict[str, Any]
    reason: str
    undoes: int | None


@dataclass(frozen=True, slots=True)
class RoleStage(Event):
    """A worker finished its part of a stage (draining, sleeping, taking_up) after so many seconds.

    Stages beside a change: ``state`` (a training worker's first weights arrived, seconds after it had connected; it counted for
    nothing until then), ``reconnected`` (it found the core again, seconds after it had lost it).
    """

    name: ClassVar[str] = "role_stage"
    worker: str
    generation: int
    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RoleChanged(Event):
    """A worker is in its new role. ``stage_s`` are seconds of its own work by stage, ``seconds`` all of it as the scheduler saw it,
    waiting for other members of the change included."""

    name: ClassVar[str] = "role_changed"
    worker: str
    generation: int
    from_role: str
    to_role: str
    from_tp: int
    to_tp: int
    stage_s: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class RoleRestored(Event):
    """A worker is in the role again that it had before a change that was given up, or before it was lost."""

    name: ClassVar[str] = "role_restored"
    worker: str
    generation: int
    role: str
    tp: int
    stage_s: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class RoleChangeFailed(Event):
    """A change is given up, because of ``detail``; its members go back to what they had."""

    name: ClassVar[str] = "role_change_failed"
    generation: int
    detail: str


@dataclass(frozen=True, slots=True)
class RoleChangeCancelled(Event):
    """A change is given up because somebody asked for it; its members go back to what they had."""

    name: ClassVar[str] = "role_change_cancelled"
    generation: int


@dataclass(frozen=True, slots=True)
class RoleMemberFailed(Event):
    """A worker could not go back to what it had either. ``restarts``: it is started anew; else it is given nothing more."""

    name: ClassVar[str] = "role_member_failed"
    worker: str
    detail: str
    restarts: bool
