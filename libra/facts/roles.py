"""Role changes of workers; see `libra.policy.role_changes` for stages and generations."""

from __future__ import annotations

from typing import Any

from libra.facts.fact import Fact, Signal


class HybridPoolOpened(Signal, frozen=True):
    """The core of group ``gang`` (0: alone) accepts hybrid replicas at ``host`` and ``port``."""

    gang: int
    host: str
    port: int


class RoleMemberJoined(Signal, frozen=True):
    """A worker that can change roles has joined; ``share``: its part of the machine."""

    worker: str
    tp: int
    slots: int
    share: dict[str, str]


class RoleStageFailed(Signal, frozen=True):
    """A stage of change ``generation`` failed on ``worker``, or its new role failed."""

    worker: str
    generation: int
    detail: str


class RoleMemberKnown(Fact, frozen=True):
    words = "{worker} can change its role"
    worker: str
    tp: int


class TurnRefused(Fact, frozen=True):
    subject = "worker"
    words = "{worker} stays as it is until the next version"
    worker: str
    detail: str = ""


class RoleChangeStarted(Fact, frozen=True):
    """Workers change to ``assignments`` (``role`` and ``tp`` by worker).

    ``undoes``: generation of the change that it undoes; None if it was requested, or a worker
    returned.
    """

    generation: int
    assignments: dict[str, dict[str, Any]]
    reason: str
    undoes: int | None


class RoleStage(Fact, frozen=True):
    """A worker finished its part of a stage (draining, sleeping, taking_up).

    Outside a change: ``state`` (a training worker received its first weights, since it connected),
    ``reconnected`` (it reached the core again, since it had lost it).
    """

    worker: str
    generation: int
    stage: str
    seconds: float


class RoleChanged(Fact, frozen=True):
    """A worker is in its new role: ``stage_s`` of its own work, ``seconds`` of the whole change."""

    subject = "worker"
    words = (
        "{worker} changes from {from_role} tp={from_tp} to {to_role} tp={to_tp} in {seconds:.2f} s, change {generation}"
    )
    worker: str
    generation: int
    from_role: str
    to_role: str
    from_tp: int
    to_tp: int
    stage_s: dict[str, float]
    seconds: float


class RoleRestored(Fact, frozen=True):
    words = "{worker} is {role} tp={tp} again, change {generation} was undone"
    worker: str
    generation: int
    role: str
    tp: int
    stage_s: dict[str, float]
    seconds: float


class RoleChangeFailed(Fact, frozen=True):
    words = "change {generation} is undone"
    generation: int
    detail: str


class RoleChangeCancelled(Fact, frozen=True):
    words = "change {generation} was cancelled on request"
    generation: int


class RoleMemberFailed(Fact, frozen=True):
    """A worker could not return to its old assignment; it is restarted, or gets no more work."""

    words = "role member failed: {worker}"
    worker: str
    detail: str
    restarts: bool
