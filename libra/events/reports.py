"""What workers and the driver report to the plugins in the scheduler: one frozen type for each kind.

On the wire (Dask's ``log_event``, topic `TOPIC`) a report is a dict of plain data: ``kind``, ``run``, ``epoch``, and the fields
of its type. A worker's report arrives before the task that sent it leaves ``processing``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from libra.types import EngineCapacity

logger = logging.getLogger(__name__)

TOPIC = "libra"


class Report(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all reports; the tag of a type is its ``kind``."""


# ---------------------------------------------------------------- trajectories


class TrajectoryReport(Report, frozen=True):
    """About the trajectory whose task is ``key``."""

    key: str


class QuantumReport(TrajectoryReport, frozen=True, tag="quantum"):
    """A quantum ended.

    ``next`` is the phase that the trajectory needs now, empty if it has ended (``end``: how); ``goes_on``: its next quantum
    begins in the same slot; ``unfinished``: the next one goes on with the same turn. ``version``: the oldest among the generated
    tokens, -1 if there are none. ``tool`` and ``status``: of the calls that returned. ``start_s``, ``stop_s``: wall clock.
    ``calls``: tools that the next action calls, if one has resources; ``ran_s``: seconds of the longest of this action's calls.
    """

    quantum: int
    next: str
    goes_on: bool
    end: str
    failure: str
    detail: str
    tokens: int
    version: int
    tool: str
    status: str
    payload_tokens: int
    context_tokens: int
    start_s: float
    stop_s: float
    unfinished: bool = False
    calls: tuple[str, ...] = ()
    ran_s: float = 0.0


class HomeChangedReport(TrajectoryReport, frozen=True, tag="home_changed"):
    """A generation ran that the scheduler had priced as a change of home; fields as in `libra.events.HomeChanged`."""

    took_s: float
    num_bytes: int
    refused: str


class FoundEndedReport(TrajectoryReport, frozen=True, tag="ended"):
    """The journal, or its group's record, shows that the trajectory ended before, after ``quanta`` records, or that many turns."""

    quanta: int
    end: str


class GivenBackReport(TrajectoryReport, frozen=True, tag="given_back"):
    """The quantum ended without a record, and runs again: the engine was put to sleep, or its worker had no place for it; with
    ``revoked`` its action was stopped, as its lease was revoked."""

    revoked: bool = False


class GroupReport(Report, frozen=True, tag="group"):
    """A group is graded, and its record is written.

    ``oldest_version``: of its tokens, -1 if it has none. ``reward``: the mean, None if no member has one. ``failures``: members
    that ended so, by class. ``resampled``: attempts that failed before those. ``block``: the worker that keeps its rows in memory
    (`libra.worker.batch_rows`), None: no worker.
    """

    split: str
    iteration: int
    group: int
    oldest_version: int
    reward: float | None
    failures: dict[str, int]
    block: dict[str, Any] | None = None
    resampled: int = 0


class ServiceReport(Report, frozen=True, tag="service"):
    """A batch of a service has ended on the worker ``name``; fields as in `libra.events.ServiceAnswered`."""

    service: str
    name: str
    requests: int
    waited_s: float
    restore_s: float
    ran_s: float
    restored: bool
    evicted: int


# ---------------------------------------------------------------- engines and weights


class PublishedReport(Report, frozen=True, tag="published"):
    """A version is in the registry; ``weights``: host and port at which the worker at ``address`` serves it."""

    version: int
    digest: str
    num_bytes: int
    address: str = ""
    weights: tuple[str, int] | None = None


class EngineKindFields(msgspec.Struct, frozen=True):
    """An engine as its worker was started for it."""

    engine: str
    bucket: str
    tp: int
    slots: int


class EngineReport(Report, frozen=True):
    """About the engine of the worker ``name`` at ``address``."""

    name: str = ""
    address: str = ""


class JoinedReport(EngineReport, frozen=True, tag="joined"):
    """The engine runs; ``weights``: host and port at which its worker serves versions, ``kv``: at which it gives KV objects."""

    weights: tuple[str, int] | None = None
    kv: tuple[str, int] | None = None
    engine: EngineKindFields | None = None


class AsleepReport(EngineReport, frozen=True, tag="asleep"):
    """The engine generates nothing until it is awake again."""


class AwakeReport(EngineReport, frozen=True, tag="awake"):
    """The engine generates again."""


class CheckNumbers(msgspec.Struct, frozen=True):
    """Numbers of a passed version check, as in `libra.events.VersionChecked`.

    ``measured``: whether its tolerances were; ``check_s``: without the load; ``stopped_s``: in which no version was served.
    """

    method: str
    gap: float
    tolerance: float
    moved_nats: float | None
    layers: int
    changed_layers: int | None
    smallest_change: float
    measured: bool
    check_s: float
    stopped_s: float


class ServedReport(EngineReport, frozen=True, tag="served", kw_only=True):
    """The engine serves a version that passed its check.

    ``load_s``: of the weights, or of the start of an engine. ``tp``, ``bucket``, ``stats``: the engine's degree, capacity
    class and counters.
    """

    version: int
    load_s: float
    check: CheckNumbers
    tp: int = 0
    bucket: str = ""
    stats: dict[str, int | float] = msgspec.field(default_factory=dict)


class QuarantinedReport(EngineReport, frozen=True, tag="quarantined", kw_only=True):
    """The engine failed the version check; ``gap`` None: it is infinite; ``out``: the engine is not started again."""

    version: int
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str
    out: bool


class RecheckedReport(EngineReport, frozen=True, tag="rechecked", kw_only=True):
    """The engine answered the check of its version once more, before it loads another; ``gap`` None: it is infinite."""

    version: int
    passed: bool
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str


class DeclaredReport(Report, frozen=True, tag="declared"):
    """Declared capacity of the engine of the worker ``name``."""

    name: str
    engine: str
    bucket: str
    model: str
    capacity: EngineCapacity

    def event_fields(self) -> dict[str, Any]:
        """Fields of `libra.events.EngineDeclared`, without the worker's name."""
        own = {"engine": self.engine, "bucket": self.bucket, "model": self.model}
        return own | self.capacity.declaration()


# ---------------------------------------------------------------- the setup of a worker


class SetupReport(Report, frozen=True):
    """About the setup of the worker ``name`` at ``address``."""

    name: str
    address: str


class ReadyReport(SetupReport, frozen=True, tag="ready"):
    """The worker's setup for the run is complete."""


class NotReadyReport(SetupReport, frozen=True, tag="not_ready"):
    """Setting up the worker raised an error."""

    detail: str


# ---------------------------------------------------------------- progress


class StepReport(Report, frozen=True, tag="step"):
    """All ranks took an optimizer step; fields as in `libra.events.StepFinished`."""

    step: int
    loss: float
    train_s: float
    beside: bool = False


class WaveReport(Report, frozen=True, tag="wave"):
    """Rank 0 added the gradient of a wave; fields as in `libra.events.WaveTrained`."""

    batch: int
    wave: int
    groups: int
    missing: int
    train_s: float
    hybrids: int = 0


class ScoredReport(Report, frozen=True, tag="scored"):
    """The teacher has scored a group; fields as in `libra.events.GroupScored`."""

    iteration: int
    group: int
    score_s: float
    waited_s: float = 0.0


class LateReport(Report, frozen=True, tag="late"):
    """What a batch does about late rewards; fields as in `libra.events.LateRewardsTaken`."""

    batch: int
    versions: int = 0
    waited: tuple[tuple[int, ...], ...] = ()
    came: tuple[tuple[int, int, int], ...] = ()
    arrived: tuple[tuple[int, ...], ...] = ()
    dropped: tuple[tuple[int, int, int], ...] = ()
    on_time: int = 0
    waiting: int = 0
    awaited: int = 0


class SessionReport(Report, frozen=True, tag="session"):
    """The pool of sessions of a worker has done so much since its last report; fields as in `libra.envs.sessions.SessionCounts`."""

    made: int = 0
    reused: int = 0
    resets: int = 0
    replaced: int = 0
    expired: int = 0


class IterationReport(Report, frozen=True, tag="iteration"):
    """An iteration ended; ``reward`` None: no trajectory had one; ``alarm``: of its mismatch, empty without one."""

    iteration: int
    reward: float | None
    lag: float
    alarm: str = ""


class EvaluationReport(Report, frozen=True, tag="evaluation"):
    """Held-out questions were answered and graded; ``reward`` None: none could be graded."""

    version: int
    reward: float | None
    prompts: int


class DriverReport(Report, frozen=True):
    """From the driver."""


class PlanReport(DriverReport, frozen=True, tag="plan"):
    """An event of the planner's for the log: its name and fields."""

    event: str
    fields: dict[str, Any]


class PromptsReport(DriverReport, frozen=True, tag="prompts"):
    """``prompt_id`` of each question of an iteration, empty for a question that does not return."""

    iteration: int
    prompts: list[str]


class BoundariesReport(DriverReport, frozen=True, tag="boundaries"):
    """Bucket boundaries, in tokens by tensor-parallel degree, as in ``policy.boundaries_tokens``."""

    tokens: dict[str, float]
    reason: str


# ---------------------------------------------------------------- training groups


class GangReport(Report, frozen=True):
    """From a training worker to `libra.scheduler.gang_plugin`."""


class TrainerReport(GangReport, frozen=True, tag="trainer"):
    """The worker ``name`` at ``address`` has a replica that trains together with others."""

    name: str
    address: str


class GangMemberReport(GangReport, frozen=True):
    """About the training group with the number ``gang``."""

    gang: int


class GangOpenReport(GangMemberReport, frozen=True, tag="gang_open"):
    """Rank 0 has opened a rendezvous."""

    host: str
    port: int


class GangJoinedReport(GangMemberReport, frozen=True, tag="gang_joined"):
    """A rank joined; its replica has taken ``steps`` steps."""

    rank: int
    steps: int


class GangFailedReport(GangMemberReport, frozen=True, tag="gang_failed"):
    """A rank cannot reach the others, or left."""

    rank: int
    detail: str


# ---------------------------------------------------------------- role changes


class RoleReport(Report, frozen=True):
    """To `libra.scheduler.role_plugin`."""


class HybridPoolReport(RoleReport, frozen=True, tag="hybrid_pool"):
    """The core of group ``gang`` (0 if it is alone) accepts hybrid replicas at ``host`` and ``port``."""

    gang: int
    host: str
    port: int


class RoleMemberReport(RoleReport, frozen=True, tag="role_member"):
    """A worker that can change roles has joined; ``tp`` and ``slots`` of the engine that it was started for.

    ``share``: its part of the machine, the fields of `libra.worker.engine_factory.Share`.
    """

    name: str
    address: str
    tp: int
    slots: int
    share: dict[str, str]


class RoleStageReport(RoleReport, frozen=True, tag="role_stage"):
    """The worker ``name`` finished a stage of change ``generation``."""

    name: str
    generation: int
    stage: str
    seconds: float


class RoleFailedReport(RoleReport, frozen=True, tag="role_failed"):
    """A stage of change ``generation`` failed on the worker ``name``."""

    name: str
    generation: int
    detail: str


# ---------------------------------------------------------------- on the wire


class Received(NamedTuple):
    """A report, the start of the run that it is about, and the address of the worker that sent it (empty: the driver did)."""

    run: str
    epoch: int
    worker: str
    report: Report


def _tagged(base: type[Report]) -> Iterator[tuple[Any, type[Report]]]:
    for cls in base.__subclasses__():
        if (tag := cls.__struct_config__.tag) != cls.__name__:  # msgspec gives a group of types its name as tag
            yield tag, cls
        yield from _tagged(cls)


REPORTS: dict[str, type[Report]] = dict(_tagged(Report))
"""Type by kind."""


def encode(run: str, epoch: int, report: Report) -> dict[str, Any]:
    """The report as ``log_event`` takes it."""
    return {"run": run, "epoch": epoch, **msgspec.to_builtins(report, enc_hook=_number)}


def _number(value: Any) -> Any:
    """A numpy scalar as the Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a report")


def decode(topic: str, message: object, among: type[Report] | tuple[type[Report], ...] = Report) -> Received | None:
    """The report in a message, if it is one of these types. A malformed one is logged and ignored, so that no hook raises."""
    if topic != TOPIC or not isinstance(message, dict):
        return None
    kind = REPORTS.get(message.get("kind", ""))
    if kind is None or not issubclass(kind, among):
        return None
    try:
        report = msgspec.convert(message, kind)
        return Received(message["run"], message["epoch"], message.get("worker", ""), report)
    except (msgspec.ValidationError, KeyError) as error:
        logger.error("a malformed report is ignored: %s: %s", error, message)
        return None
