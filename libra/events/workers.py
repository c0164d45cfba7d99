"""Workers, their engines and the weights they hold."""

from __future__ import annotations

from libra.events.event import Event


class VersionPublished(Event, frozen=True):
    """Weights ``version`` are in the registry, with their content hash."""

    version: int
    digest: str
    num_bytes: int


class VersionServed(Event, frozen=True):
    """The engine of ``worker`` generates with ``version`` from now on.

    ``bucket`` is its capacity class: engines of one kind, tensor-parallel degree and number of threads have the same.
    ``stats`` counts the engine's work since it started: tokens generated, prefilled and reused, steps, busy seconds, and
    how often its process was replaced; with ``rollout.speculate`` also tokens drafted and accepted by batch size (a power of two),
    and ``draft_gain_batchN``: tokens per second of steps with drafts over those without.
    """

    version: int
    worker: str
    load_s: float
    tp: int = 1
    bucket: str = ""
    stats: dict[str, int | float] = {}


class VersionOrdered(Event, frozen=True):
    """The engine of ``worker`` is to take ``version``, for this reason; only in runs with one version per trajectory
    (`libra.policy.one_version`)."""

    worker: str
    version: int
    reason: str


class EngineVacated(Event, frozen=True):
    """These trajectories, at home on ``worker``, go on on other engines of their version, for this reason: it is to take newer
    weights (`libra.policy.one_version`)."""

    worker: str
    keys: tuple[str, ...]
    reason: str


class VersionChecked(Event, frozen=True):
    """The engine of ``worker`` passed the version check for ``version``, before the version counts as served.

    ``method`` is the comparison that tells the version from what the engine held before (columns, probe, projections), with
    its ``gap`` and ``tolerance``; ``moved_nats`` is the median change of the probe's log-probabilities since the version
    before. ``layers`` were compared; of ``changed_layers`` a changed column was read. ``smallest_change`` of one layer would
    have been noticed: 0 is one bit, else relative to the layer's root mean square, of a probe in nats. ``measured``: the
    tolerance was measured at version 0. ``check_s`` is wall time beside the loading, of which the last ``stopped_s`` (with the
    loading) passed before a turn could begin. `libra.weights.version_check` has the rules.
    """

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


class EngineQuarantined(Event, frozen=True):
    """The engine of ``worker`` failed the version check for ``version``: it gets no trajectory until another check passes.

    ``layer`` disagrees by ``gap`` (None: it gave no number), allowed was ``tolerance``, both in the unit of ``method``.
    ``out``: an engine started from the version's own file failed too; it gets no trajectory for the rest of this start.
    """

    version: int
    worker: str
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str
    out: bool


class VersionRechecked(Event, frozen=True):
    """The engine of ``worker`` answered the check for ``version`` once more, before it loads the next one.

    ``passed``: it still held the version; else ``layer`` ("(all)": only log-probabilities) disagrees by ``gap`` (None: it gave no
    number), allowed was ``tolerance``, both in the unit of ``method``. Only in runs with a mismatch alarm.
    """

    version: int
    worker: str
    passed: bool
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str


class WorkerJoined(Event, frozen=True):
    """A Dask worker joined."""

    worker: str
    address: str


class WorkerSetupFailed(Event, frozen=True):
    """A Dask worker joined, but its setup for the run failed because of ``detail``.

    It is restarted ``retry_after_s`` later; None: not automatically.
    """

    worker: str
    address: str
    detail: str
    retry_after_s: float | None = None


class WorkerCapacity(Event, frozen=True):
    """The policy's facts about a worker from now on; fields as of `libra.policy.messages.WorkerJoined`."""

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
    kv_token_bytes: int = 0


class ToolCapacity(Event, frozen=True):
    """What a worker has for actions besides slots, from now on."""

    worker: str
    cores: int
    memory_bytes: int
    gpus: int


class ToolWorkersOrdered(Event, frozen=True):
    """There should be ``ordered`` tool workers from now on, without ``give_up`` (empty: none is given up), for this ``reason``.

    The other fields are what that follows from (`libra.policy.tool_fleet.FleetFacts`).
    """

    least: int
    most: int
    wanted: int
    starting: int
    units: int
    waiting: int
    waiting_s: float
    behind_s: float
    start_s: float
    idle: tuple[tuple[str, float], ...]
    ordered: int
    give_up: str
    reason: str


class ServiceAnswered(Event, frozen=True):
    """A batch of ``service`` has ended on ``worker``, with ``requests`` of this run in it.

    ``waited_s``: of the oldest of them; ``restore_s``: until the weights were on the device and verified; ``ran_s``: its function,
    with what it waited for an API that refused calls. ``restored``: the weights were not there; ``evicted``: services that made
    room.
    """

    service: str
    worker: str
    requests: int
    waited_s: float
    restore_s: float
    ran_s: float
    restored: bool
    evicted: int


class EngineDeclared(Event, frozen=True):
    """The engine of ``worker`` declares itself: at its start, after each rebucket, and when its measured seconds have changed.

    The fields are those of `libra.types.EngineCapacity`, its measured seconds (`libra.types.StepSeconds`) flat beside them; they
    are None before enough passes ran. ``engine`` is its kind (``transformers``, ``vllm``), ``bucket`` its capacity class, and
    ``model`` names the architecture it serves, so that seconds of one model are never taken for another's.
    """

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
    exchanges_kv: bool = False


class SlotsSet(Event, frozen=True):
    """The engine of ``worker`` takes at most ``slots`` trajectories at once while its degree is ``tp``, for this reason.

    ``of_slots`` are those it was started with; None: an engine of this degree is not there now, and the limit waits for it.
    """

    worker: str
    tp: int
    slots: int
    of_slots: int | None
    reason: str


class WorkerWithdrawn(Event, frozen=True):
    """A worker takes no more tasks: it has left, or is about to."""

    worker: str


class WorkerLost(Event, frozen=True):
    """A Dask worker left; each lost quantum has its own ``quantum_lost``. ``worker``: its name, if it ever had slots."""

    address: str
    worker: str = ""


class GangFormed(Event, frozen=True):
    """Training replicas are one process group, number ``gang``; ``members`` are workers by rank, all after ``steps`` steps."""

    gang: int
    members: tuple[str, ...]
    steps: int


class GangLost(Event, frozen=True):
    """Process group ``gang`` has ended: ``worker`` left, or could not reach the others."""

    gang: int
    worker: str
    detail: str


class StallDetected(Event, frozen=True):
    """The run made no progress for ``idle_s``.

    ``key`` has been on ``worker`` the longest, in ``stage``; all three are empty if nothing runs, and ``detail`` gives what the
    parked tasks wait for. ``parked`` tasks wait. ``last_event`` is the last line before. ``stacks`` is the file, within the run
    directory, with the stacks of the worker's threads and coroutines. ``restarts``: the worker is
    restarted, unless the run makes progress in the meantime.
    """

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
