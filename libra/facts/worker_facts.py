"""Workers, their engines and the weights they hold."""

from __future__ import annotations

from typing import Any

import msgspec

from libra.facts.fact import Fact, Signal


class VersionPublished(Fact, frozen=True, gc=False):
    """Weights ``version`` are in the registry, with their content hash."""

    words = "version {version} is published"
    version: int
    digest: str = ""
    num_bytes: int = 0


class WeightsHeld(Signal, frozen=True):
    """The worker that trains serves ``version`` at this host and port."""

    version: int
    digest: str
    at: tuple[str, int]


class VersionServed(Fact, frozen=True):
    """The engine of ``worker`` generates with ``version`` from now on.

    ``bucket`` is its capacity class: engines of one kind, tensor-parallel degree and number of
    threads. ``stats`` counts the engine's work since its start: tokens generated, prefilled and
    reused, steps, busy seconds, process replacements. With ``rollout.speculate`` it also has tokens
    drafted and accepted by batch size (a power of two), and their speed-up, ``draft_gain_batchN``.
    """

    subject = "worker"
    words = "{worker} serves version {version}, loaded in {load_s:.3g} s"
    version: int
    worker: str
    load_s: float
    tp: int = 1
    bucket: str = ""
    stats: dict[str, int | float] = {}


class VersionChecked(Fact, frozen=True):
    """The engine of ``worker`` passed the version check, before ``version`` counts as served.

    Rules and units: `libra.weights.version_check`.
    """

    version: int
    worker: str
    method: str  # columns, probe or projections
    gap: float
    tolerance: float
    moved_nats: float | None  # median change of the probe's log-probabilities
    layers: int  # compared
    changed_layers: int | None  # of which a changed column was read
    smallest_change: float  # that would have been noticed in one layer
    measured: bool  # the tolerance was measured at version 0
    check_s: float  # wall time beside the loading
    stopped_s: float  # with the loading, before a turn could begin


class VersionRechecked(Fact, frozen=True):
    """The engine of ``worker`` answered the check for ``version`` again, before it loads the next.

    Only in runs with a mismatch alarm. ``layer`` is "(all)" if only log-probabilities disagree;
    ``gap`` is None if the engine gave no number.
    """

    version: int
    worker: str
    passed: bool
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str


class EngineQuarantined(Fact, frozen=True):
    """The engine of ``worker`` failed the version check; it gets no trajectory until it passes.

    ``out``: an engine started from the version's own file failed too, and stays out for the rest of
    this start.
    """

    words = "engine failed the version check: {worker}"
    version: int
    worker: str
    layer: str
    method: str
    gap: float | None
    tolerance: float
    detail: str
    out: bool


class EngineKindFields(msgspec.Struct, frozen=True):
    """An engine as its worker was started for it."""

    engine: str
    bucket: str
    tp: int
    slots: int


class EngineJoined(Signal, frozen=True):
    """The engine of ``worker`` runs; ports of its servers of versions and of KV objects."""

    worker: str
    engine: EngineKindFields
    weights: tuple[str, int] | None = None
    kv: tuple[str, int] | None = None


class EngineSlept(Signal, frozen=True):
    worker: str


class EngineWoke(Signal, frozen=True):
    worker: str


class EngineDeclared(Fact, frozen=True):
    """The engine of ``worker`` declares its capacity, at its start and after each change.

    Fields of `libra.types.EngineCapacity`, and of `libra.types.StepSeconds` flat beside them (None
    before enough passes). ``model`` names the architecture, so that no other uses its seconds.
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


class WorkerJoined(Fact, frozen=True):
    worker: str
    address: str


class WorkerReady(Signal, frozen=True):
    worker: str


class SetupFailed(Signal, frozen=True):
    worker: str
    detail: str


class WorkerSetupFailed(Fact, frozen=True):
    """The setup of a worker failed; it is restarted after ``retry_after_s`` (None if never)."""

    words = "setup failed: {worker}"
    worker: str
    address: str
    detail: str
    retry_after_s: float | None = None


class WorkerCapacity(Fact, frozen=True, gc=False):
    """A worker takes quanta from now on, or a known worker has changed; 0 is unknown."""

    worker: str
    bucket: str = ""  # rollout capacity class, e.g. ``tp2``; empty: only one
    rollout_slots: int = 0
    tool_slots: int = 0
    kv_tokens: int = 0  # that its engine holds
    alone_s_per_token: float = 0.0  # of a trajectory that is alone in the engine
    full_s_per_token: float = 0.0  # with all slots and the KV memory full
    prefill_s_per_token: float = 0.0  # to compute the KV of context again
    beside_s_per_token: float = 0.0  # that each other running generation adds
    max_context_tokens: int = 0  # longest context of one trajectory
    kv_token_bytes: int = 0  # of an engine that exchanges KV; 0: it does not

    @property
    def declared(self) -> bool:
        """Whether memory and speed are known; without them nothing is placed by length."""
        return self.kv_tokens > 0 and self.alone_s_per_token > 0.0

    @property
    def context_s_per_token(self) -> float:
        """Seconds per generated token that each token of context held there adds, if `declared`."""
        beside_s = self.beside_s_per_token * max(0, self.rollout_slots - 1)
        return max(0.0, self.full_s_per_token - self.alone_s_per_token - beside_s) / self.kv_tokens


class WorkerWithdrawn(Fact, frozen=True, gc=False):
    """A worker takes no more tasks; its KV is lost, and quanta that ran there park again."""

    worker: str


class WorkerLost(Fact, frozen=True):
    """A Dask worker left; each lost quantum has its own ``quantum_lost``."""

    address: str
    worker: str = ""


class SlotsSet(Fact, frozen=True):
    """The engine of ``worker`` takes at most ``slots`` trajectories while its degree is ``tp``.

    ``of_slots``: slots at its start; None if no engine of this degree is present yet.
    """

    words = "{worker} takes at most {slots} trajectories at once"
    worker: str
    tp: int
    slots: int
    of_slots: int | None
    reason: str


# ---------------------------------------------------------------- tools


class ToolNeeds(msgspec.Struct, frozen=True, gc=False):
    """Resources of one call of a tool; see `libra.envs.tool.Tool`."""

    least_cores: int = 0
    most_cores: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    elastic: tuple[float, ...] | dict[int, float] | str | None = None  # speeds, or "measure"
    quota: str = ""
    revocable: bool = False  # it may be stopped, and called again later


class ToolsDeclared(Fact, frozen=True, gc=False):
    """Tools with resources, by name, and quotas: from now on actions hold leases."""

    tools: dict[str, ToolNeeds]
    quotas: dict[str, str]


class ToolCapacity(Fact, frozen=True, gc=False):
    worker: str
    cores: int
    memory_bytes: int
    gpus: int


class ToolWorkersOrdered(Fact, frozen=True):
    """The number of tool workers from now on, decided by `libra.policy.tool_fleet`."""

    least: int
    most: int
    wanted: int  # workers present or starting
    starting: int
    units: int  # cores that all give, or slots where no action leases any
    waiting: int  # actions
    waiting_s: float  # their unit-seconds
    behind_s: float  # for which some have waited without a pause
    start_s: float  # mean seconds until a requested worker is there
    idle: tuple[tuple[str, float], ...] = ()  # workers beyond the first ``least``, and for how long
    ordered: int = 0  # workers that there should be; 0: not decided
    give_up: str = ""  # the worker to end
    reason: str = ""


# ---------------------------------------------------------------- training groups


class TrainerJoined(Signal, frozen=True):
    worker: str


class GangSignal(Signal, frozen=True):
    """A signal about the training group with the number ``gang``."""

    gang: int


class GangOpen(GangSignal, frozen=True):
    host: str
    port: int


class GangRankJoined(GangSignal, frozen=True):
    """A rank joined after ``steps`` steps."""

    rank: int
    steps: int


class GangRankFailed(GangSignal, frozen=True):
    """A rank cannot reach the others, or left."""

    rank: int
    detail: str


class GangFormed(Fact, frozen=True):
    """Training replicas form process group ``gang``; ``members`` by rank, after ``steps`` steps."""

    gang: int
    members: tuple[str, ...]
    steps: int


class GangLost(Fact, frozen=True):
    """Process group ``gang`` has ended: ``worker`` left, or could not reach the others."""

    words = "gang lost: {worker}"
    gang: int
    worker: str
    detail: str


class StallDetected(Fact, frozen=True):
    """The run made no progress for ``idle_s``.

    ``key`` has been on ``worker`` the longest. If nothing runs, ``key`` is empty and ``detail`` has
    what parked tasks wait for. ``stacks``: the file with the worker's stacks. ``restarts``: the
    worker is restarted unless the run makes progress.
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

    ``undoes``: generation of the change that is undone; None if requested, or if a worker returned.
    """

    generation: int
    assignments: dict[str, dict[str, Any]]
    reason: str
    undoes: int | None


class RoleStage(Fact, frozen=True):
    """A worker finished its part of a stage (draining, sleeping, taking_up).

    Outside a change: ``state`` (a training worker received its first weights since it connected) or
    ``reconnected`` (it reached the core again after losing it).
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
