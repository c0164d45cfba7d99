"""What happened to workers, their engines and the weights they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from libra.events.event import Event


@dataclass(frozen=True, slots=True)
class VersionPublished(Event):
    """Weights ``version`` are in the registry, with their content hash."""

    name: ClassVar[str] = "version_published"
    version: int
    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class VersionServed(Event):
    """The engine of ``worker`` generates with ``version`` from now on.

    ``bucket`` is its capacity class: engines of one kind, tensor-parallel degree and number of threads have the same.
    ``stats`` is what the engine has done since it started: tokens generated, prefilled and reused, steps, busy seconds, and how
    often its process was replaced.
    """

    name: ClassVar[str] = "version_served"
    version: int
    worker: str
    load_s: float
    tp: int = 1
    bucket: str = ""
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionChecked(Event):
    """The engine of ``worker`` showed that it holds ``version``, before the version counted as served.

    ``method`` is the comparison that tells the version from what the engine held before (columns, probe, projections), with
    its ``gap`` and ``tolerance``; ``moved_nats`` is the median change of the probe's log-probabilities since the version
    before. ``layers`` were compared; of ``changed_layers`` a changed column was read. ``smallest_change`` of one layer would
    have been noticed: 0 is one bit, else relative to the layer's root mean square, of a probe in nats. ``measured``: the
    tolerance was measured at version 0. ``check_s`` is wall time beside the loading, of which the last ``stopped_s`` (with the
    loading) passed before a turn could begin. `libra.weights.version_check` has the rules.
    """

    name: ClassVar[str] = "version_checked"
    version: int
    worker: str
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


@dataclass(frozen=True, slots=True)
class EngineQuarantined(Event):
    """The engine of ``worker`` does not hold ``version``: it is given no trajectory until another check passes.

    ``layer`` disagrees by ``gap`` (None: it gave no number), allowed was ``tolerance``, both in the unit of ``method``.
    ``out``: an engine started from the version's own file disagrees too, and stays out for the rest of this start.
    """

    name: ClassVar[str] = "engine_quarantined"
    version: int
    worker: str
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str
    out: bool


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A Dask worker came."""

    name: ClassVar[str] = "worker_joined"
    worker: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerSetupFailed(Event):
    """A Dask worker came and takes no part in the run: what is needed there could not be made, because of ``detail``.

    It is started anew ``retry_after_s`` later; None: not by itself.
    """

    name: ClassVar[str] = "worker_setup_failed"
    worker: str
    address: str
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerCapacity(Event):
    """What the policy knows of a worker from now on; the fields are those of `libra.policy.messages.WorkerJoined`."""

    name: ClassVar[str] = "worker_capacity"
    worker: str
    bucket: str
    rollout_slots: int
    tool_slots: int
    kv_tokens: int
    alone_s_per_token: float
    full_s_per_token: float
    prefill_s_per_token: float
    beside_s_per_token: float
    max_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineDeclared(Event):
    """The engine of ``worker`` says what it is: at its start, after each rebucket, and when its measured seconds have changed.

    The fields are those of `libra.types.EngineCapacity`, its measured seconds (`libra.types.StepSeconds`) flat beside them; they
    are None before enough passes ran. ``engine`` is its kind (``transformers``, ``vllm``), ``bucket`` its capacity class, and
    ``model`` names the architecture it serves, so that seconds of one model are never taken for another's.
    """

    name: ClassVar[str] = "engine_declared"
    worker: str
    engine: str
    bucket: str
    model: str
    kv_tokens: int
    kv_bytes: int
    kv_token_bytes: int
    slots: int
    tp: int
    fixed_s: float | None = None
    sequence_s: float | None = None
    context_token_s: float | None = None
    prefill_token_s: float | None = None
    num_steps: int = 0
    error_frac: float | None = None
    max_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SlotsSet(Event):
    """The engine of ``worker`` takes at most ``slots`` trajectories at once while its degree is ``tp``, for this reason.

    ``of_slots`` are those it was started with; None: an engine of this degree is not there now, and the limit waits for it.
    """

    name: ClassVar[str] = "slots_set"
    worker: str
    tp: int
    slots: int
    of_slots: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerWithdrawn(Event):
    """A worker takes nothing more: it has left, or is about to."""

    name: ClassVar[str] = "worker_withdrawn"
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A Dask worker left; each quantum it took along has its own ``quantum_lost``."""

    name: ClassVar[str] = "worker_lost"
    address: str


@dataclass(frozen=True, slots=True)
class GangFormed(Event):
    """Training replicas are one process group, number ``gang``; ``members`` are workers by rank, all after ``steps`` steps."""

    name: ClassVar[str] = "gang_formed"
    gang: int
    members: tuple[str, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class GangLost(Event):
    """Process group ``gang`` is over: ``worker`` left, or could not reach the others."""

    name: ClassVar[str] = "gang_lost"
    gang: int
    worker: str
    detail: str


@dataclass(frozen=True, slots=True)
class StallDetected(Event):
    """Nothing of the run made progress for ``idle_s``.

    ``key`` has been on ``worker`` the longest, in ``stage``; all three are empty where nothing runs, and ``detail`` says
    what is waited for. ``parked`` tasks wait. ``last_event`` is the last line before. ``stacks`` is the file, within the run
    directory, that says where the worker's threads and coroutines are. ``restarts``: the worker is
    restarted for it, unless the run goes on in the meantime.
    """

    name: ClassVar[str] = "stall_detected"
    key: str
    worker: str
    address: str
    stage: str
    idle_s: float
    parked: int
    detail: str
    last_event: str
    stacks: str
    restarts: bool
