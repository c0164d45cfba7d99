"""Role changes of workers; see `libra.policy.role_changes` for stages and generations."""

from __future__ import annotations

from typing import Any

from libra.events.event import Event


class RoleMemberKnown(Event, frozen=True):
    """A worker that can change roles is there; ``tp``: GPUs that it was started with."""

    worker: str
    tp: int


class EngineTurned(Event, frozen=True):
    """The GPUs of the engine of ``worker`` are to train for the open step, or to generate again, for this reason.

    ``to``: training or rollout. See `libra.policy.turning`; a change of roles follows, or `TurnRefused`.
    """

    worker: str
    to: str
    reason: str


class TurnRefused(Event, frozen=True):
    """A turn could not begin because of ``detail``; the worker rests until the next version."""

    worker: str
    detail: str


class RoleChangeStarted(Event, frozen=True):
    """A change to other roles has begun: ``assignments`` has ``role`` and ``tp`` by worker.

    ``undoes`` is the generation of the change that it undoes; None: it was requested, or a worker returned.
    """

    generation: int
    assignments: dict[str, Any]
    reason: str
    undoes: int | None


class RoleStage(Event, frozen=True):
    """A worker finished its part of a stage (draining, sleeping, taking_up) after so many seconds.

    Stages outside a change: ``state`` (a training worker received its first weights, and counts from then on; seconds since
    it connected), ``reconnected`` (it reached the core again; seconds since it had lost it).
    """

    worker: str
    generation: int
    stage: str
    seconds: float


class RoleChanged(Event, frozen=True):
    """A worker is in its new role. ``stage_s`` are seconds of its own work by stage, ``seconds`` those of the change as the
    scheduler measured them, waiting for other members included."""

    worker: str
    generation: int
    from_role: str
    to_role: str
    from_tp: int
    to_tp: int
    stage_s: dict[str, float]
    seconds: float


class RoleRestored(Event, frozen=True):
    """A worker has the role again that it had before an undone change, or before it was lost."""

    worker: str
    generation: int
    role: str
    tp: int
    stage_s: dict[str, float]
    seconds: float


class RoleChangeFailed(Event, frozen=True):
    """A change failed because of ``detail``; its members return to their old assignments."""

    generation: int
    detail: str


class RoleChangeCancelled(Event, frozen=True):
    """A change was cancelled on request; its members return to their old assignments."""

    generation: int


class RoleMemberFailed(Event, frozen=True):
    """A worker could not return to its old assignment. ``restarts``: it is restarted; else it gets no more work."""

    worker: str
    detail: str
    restarts: bool
