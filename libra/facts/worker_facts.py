"""Workers, their engines and the weights they hold."""

from __future__ import annotations

import msgspec

from libra.facts.fact import Fact, Signal


class VersionPublished(Fact, frozen=True, gc=False):
    """Weights ``version`` are in the registry, with their content hash: what was learned about lengths is of an older policy."""

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

    ``bucket`` is its capacity class: engines of one kind, tensor-parallel degree and number of threads have the same.
    ``stats`` counts the engine's work since it started: tokens generated, prefilled and reused, steps, busy seconds, and
    how often its process was replaced; with ``rollout.speculate`` also tokens drafted and accepted by batch size (a power of two),
    and ``draft_gain_batchN``: tokens per second of steps with drafts over those without.
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


class VersionRechecked(Fact, frozen=True):
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


class EngineQuarantined(Fact, frozen=True):
    """The engine of ``worker`` failed the version check for ``version``: it gets no trajectory until another check passes.

    ``layer`` disagrees by ``gap`` (None: it gave no number), allowed was ``tolerance``, both in the unit of ``method``.
    ``out``: an engine started from the version's own file failed too; it gets no trajectory for the rest of this start.
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
    """The engine of ``worker`` runs; ``weights``: host and port at which its worker serves versions, ``kv``: at which it gives KV
    objects."""

    worker: str
    engine: EngineKindFields
    weights: tuple[str, int] | None = None
    kv: tuple[str, int] | None = None


class EngineSlept(Signal, frozen=True):
    """The engine of ``worker`` generates nothing until it is awake again."""

    worker: str


class EngineWoke(Signal, frozen=True):
    """The engine of ``worker`` generates again."""

    worker: str


class EngineDeclared(Fact, frozen=True):
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


class WorkerJoined(Fact, frozen=True):
    """A Dask worker joined."""

    worker: str
    address: str


class WorkerReady(Signal, frozen=True):
    """The setup of ``worker`` for the run is complete."""

    worker: str


class SetupFailed(Signal, frozen=True):
    """Setting up ``worker`` raised an error."""

    worker: str
    detail: str


class WorkerSetupFailed(Fact, frozen=True):
    """A Dask worker joined, but its setup for the run failed because of ``detail``.

    It is restarted ``retry_after_s`` later; None: not automatically.
    """

    words = "setup failed: {worker}"

    worker: str
    address: str
    detail: str
    retry_after_s: float | None = None


class WorkerCapacity(Fact, frozen=True, gc=False):
    """A worker takes quanta from now on, or a known worker has changed.

    Attributes
    ----------
    worker : str
    bucket : str
        Rollout capacity class, e.g. ``"tp2"``: engines of one tensor-parallel degree. Empty: there is only one.
    rollout_slots, tool_slots : int
        Quanta of each phase that it takes at once.
    kv_tokens : int
        Tokens of KV that its engine holds; 0: not known.
    alone_s_per_token, full_s_per_token : float
        Seconds per generated token of a trajectory that is alone in the engine, and with all slots and the KV memory full; 0:
        not known, and then no speed is known.
    prefill_s_per_token : float
        Seconds to compute the KV of one token of context again.
    beside_s_per_token : float
        Seconds that each other running generation adds to a token, whatever its context; the rest of a full engine's slowdown
        depends on the KV held.
    max_context_tokens : int
        Longest context of one trajectory; 0: not known.
    kv_token_bytes : int
        Bytes of one token's KV, of an engine that exchanges KV with others; 0: it exchanges none.
    """

    worker: str
    bucket: str = ""
    rollout_slots: int = 0
    tool_slots: int = 0
    kv_tokens: int = 0
    alone_s_per_token: float = 0.0
    full_s_per_token: float = 0.0
    prefill_s_per_token: float = 0.0
    beside_s_per_token: float = 0.0
    max_context_tokens: int = 0
    kv_token_bytes: int = 0

    @property
    def declared(self) -> bool:
        """Whether its engine has declared memory and speed; without them nothing is placed by length."""
        return self.kv_tokens > 0 and self.alone_s_per_token > 0.0

    @property
    def context_s_per_token(self) -> float:
        """Seconds that each token of context at home there adds to a generated one; `declared` must be true."""
        beside_s = self.beside_s_per_token * max(0, self.rollout_slots - 1)
        return max(0.0, self.full_s_per_token - self.alone_s_per_token - beside_s) / self.kv_tokens


class WorkerWithdrawn(Fact, frozen=True, gc=False):
    """A worker takes no more tasks: it has left, or is about to. Its KV is lost; quanta that ran there are parked again."""

    worker: str


class WorkerLost(Fact, frozen=True):
    """A Dask worker left; each lost quantum has its own ``quantum_lost``. ``worker``: its name, if it ever had slots."""

    address: str
    worker: str = ""


class SlotsSet(Fact, frozen=True):
    """The engine of ``worker`` takes at most ``slots`` trajectories at once while its degree is ``tp``, for this reason.

    ``of_slots`` are those it was started with; None: an engine of this degree is not there now, and the limit waits for it.
    """

    words = "{worker} takes at most {slots} trajectories at once"

    worker: str
    tp: int
    slots: int
    of_slots: int | None
    reason: str


# ---------------------------------------------------------------- tools


class ToolNeeds(msgspec.Struct, frozen=True, gc=False):
    """What one call of a tool takes; see `libra.envs.tool.Tool`.

    ``elastic``: speeds of ``least_cores`` to ``most_cores`` cores, or by cores, or "measure"; None: it takes its least.
    ``revocable``: it may be stopped, and called again later.
    """

    least_cores: int = 0
    most_cores: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    elastic: tuple[float, ...] | dict[int, float] | str | None = None
    quota: str = ""
    revocable: bool = False


class ToolsDeclared(Fact, frozen=True, gc=False):
    """Tools with resources, by name, and quotas as a configuration writes them: from now on actions hold leases."""

    tools: dict[str, ToolNeeds]
    quotas: dict[str, str]


class ToolCapacity(Fact, frozen=True, gc=False):
    """What a worker has for actions besides slots, from now on."""

    worker: str
    cores: int
    memory_bytes: int
    gpus: int


class ToolWorkersOrdered(Fact, frozen=True):
    """The number of tool workers from now on, and what `libra.policy.tool_fleet` decided it from.

    Attributes
    ----------
    least, most, wanted : int
        Bounds, and the workers that there are or that start.
    starting : int
        Those of them that start.
    units : int
        What all present workers together give to actions: cores, or slots where no action leases any.
    waiting : int
        Actions that wait.
    waiting_s : float
        Unit-seconds of all of these.
    behind_s : float
        Seconds for which some have waited without a pause.
    start_s : float
        Mean seconds from asking for a worker until it is there.
    idle : tuple of (str, float)
        Present workers beyond the first ``least`` that have nothing to do, and for how many seconds.
    ordered : int
        Workers that there should be; 0: not decided yet.
    give_up : str
        The worker to end; empty: none.
    reason : str
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
    idle: tuple[tuple[str, float], ...] = ()
    ordered: int = 0
    give_up: str = ""
    reason: str = ""


# ---------------------------------------------------------------- training groups


class TrainerJoined(Signal, frozen=True):
    """``worker`` has a replica that trains together with others."""

    worker: str


class GangSignal(Signal, frozen=True):
    """About the training group with the number ``gang``."""

    gang: int


class GangOpen(GangSignal, frozen=True):
    """Rank 0 has opened a rendezvous."""

    host: str
    port: int


class GangRankJoined(GangSignal, frozen=True):
    """A rank joined; its replica has taken ``steps`` steps."""

    rank: int
    steps: int


class GangRankFailed(GangSignal, frozen=True):
    """A rank cannot reach the others, or left."""

    rank: int
    detail: str


class GangFormed(Fact, frozen=True):
    """Training replicas are one process group, number ``gang``; ``members`` are workers by rank, all after ``steps`` steps."""

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
