"""Events that a policy receives (past tense) and commands that it answers with (imperative, each with its reason)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from libra.policy.turning import Turn
from libra.policy.way_choice import TakeSteps
from libra.types import Phase, ToolOutcome


class Priority(NamedTuple):
    """Order of parked tasks, compared left to right, smaller first. It is what ``ts.priority`` holds in the scheduler."""

    deadline: int  # iteration that must not wait for later ones
    level: int  # MLFQ level, 0 first; -1 is overdue
    order: int  # within a level


class TrajectoryParked(msgspec.Struct, frozen=True, gc=False):
    """A trajectory waits for a slot: for the first time (``quanta`` 0), or after a quantum was committed or lost.

    ``group`` is shared by the samples of one prompt, ``family`` by all trajectories of one environment; empty: unknown.
    ``context_tokens`` are those whose KV another engine would compute again; 0: not known.
    """

    key: str
    iteration: int
    phase: Phase
    quanta: int
    group: str = ""
    family: str = ""
    context_tokens: int = 0


class GroupsNamed(msgspec.Struct, frozen=True, gc=False):
    """Prompts of groups that have not started yet, as (group, prompt); a prompt has the same name in every iteration."""

    groups: tuple[tuple[str, str], ...]


def groups_named(split: str, iteration: int, prompts: Sequence[str]) -> GroupsNamed:
    """`GroupsNamed` of an iteration whose group ``k`` is of ``prompts[k]``, by the names that the scheduler gives to groups."""
    return GroupsNamed(tuple((f"{split}-{iteration}-{k}", prompt) for k, prompt in enumerate(prompts) if prompt))


class QuantumStarted(msgspec.Struct, frozen=True, gc=False):
    """A parked trajectory was given a slot of ``phase`` on ``worker``; a generation makes this worker the holder of its
    KV."""

    key: str
    phase: Phase
    worker: str


class QuantumFinished(msgspec.Struct, frozen=True, gc=False):
    """A quantum was committed: a generation of ``tokens`` tokens, or an action whose tool came back with ``status``.

    A generation whose tools ran inline names them too; ``status`` is `NO_TOOL` where none came back. ``tool`` may be empty if
    one did: a malformed call need not name any. ``payload_tokens`` are those that the tools put into the context, ``tools_s`` the
    seconds of ``latency_s`` in which a generation's slot waited for them.
    """

    key: str
    phase: Phase
    tokens: int
    tool: str
    status: ToolOutcome
    latency_s: float
    payload_tokens: int = 0
    tools_s: float = 0.0


class HomeForgotten(msgspec.Struct, frozen=True, gc=False):
    """The KV of a trajectory is no longer needed: its last attempt there failed."""

    key: str


class TrajectoryEnded(msgspec.Struct, frozen=True, gc=False):
    """A trajectory has ended; the policy may forget it.

    ``completed`` is false if it failed or was abandoned: nothing is learned from its length.
    """

    key: str
    completed: bool = True


class VersionPublished(msgspec.Struct, frozen=True, gc=False):
    """The weights changed: what was learned about lengths belongs to an older policy."""

    version: int


class BoundariesSet(msgspec.Struct, frozen=True, gc=False):
    """A plan assigns buckets to lengths: pairs (TP degree, generated tokens), ascending in both.

    A trajectory of at most that many tokens should begin on engines of that degree; one longer than all, on engines of a
    higher one. Empty: there is no plan.
    """

    boundaries: tuple[tuple[int, float], ...]


def boundaries_of(tokens: Mapping[Any, float]) -> tuple[tuple[int, float], ...]:
    """Boundaries as a configuration has them (``{"tp1": 3000}``), for `BoundariesSet`."""
    return tuple(sorted((int(name.removeprefix("tp")), float(end)) for name, end in tokens.items()))


class WorkerJoined(msgspec.Struct, frozen=True, gc=False):
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


class KVTransferred(msgspec.Struct, frozen=True, gc=False):
    """The KV of a trajectory went from one engine to another, and was taken."""

    num_bytes: int
    seconds: float


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


class ToolsDeclared(msgspec.Struct, frozen=True, gc=False):
    """Tools with resources, by name, and quotas as a configuration writes them: from now on actions hold leases."""

    tools: dict[str, ToolNeeds]
    quotas: dict[str, str]


class ToolCapacity(msgspec.Struct, frozen=True, gc=False):
    """What a worker has for actions besides slots."""

    worker: str
    cores: int
    memory_bytes: int
    gpus: int


class ActionRequested(msgspec.Struct, frozen=True, gc=False):
    """The calls that a trajectory parks for next, by their tools, one of which has declared resources; before its
    `TrajectoryParked`."""

    key: str
    tools: tuple[str, ...]


class LeaseTaken(msgspec.Struct, frozen=True, gc=False):
    """What the lease of a placed action holds, and when it was granted."""

    at_s: float
    cores: int
    memory_bytes: int
    gpus: int


class WorkerLeft(msgspec.Struct, frozen=True, gc=False):
    """A worker has left, and its KV is lost; quanta that ran there are parked again."""

    worker: str


class SetPriority(msgspec.Struct, frozen=True, gc=False):
    """Give a parked trajectory this place in the order."""

    key: str
    priority: Priority
    reason: str


class Prefer(msgspec.Struct, frozen=True, gc=False):
    """Let a parked trajectory take slots of these buckets: besides those of its home, or preferably if it has no home.

    Forecast: it generates ``left_tokens`` more, and reaches ``final_tokens`` of context; 0: no forecast. Without a home it should
    begin on engines of degree ``begins_tp``, or of the next higher one present; 0: on any engine.
    """

    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int = 0
    final_tokens: int = 0
    begins_tp: int = 0


class Move(msgspec.Struct, frozen=True, gc=False):
    """The price of a change of home; see `libra.policy.move_price`.

    Attributes
    ----------
    home : str
        The worker whose engine has the KV.
    tokens : int
        Context tokens.
    prefill_s : float
        Expected seconds of computing their KV again; 0: not known.
    transfer_s : float or None
        Expected seconds of sending it; None: the two engines do not exchange KV.
    sends : bool
        Whether the KV is sent.
    """

    home: str
    tokens: int
    prefill_s: float
    transfer_s: float | None
    sends: bool

    @property
    def seconds(self) -> float:
        """What the move costs: the lesser of the two, 0 if it is not known."""
        return self.transfer_s if self.sends and self.transfer_s is not None else self.prefill_s


class Place(msgspec.Struct, frozen=True, gc=False):
    """Give a parked trajectory a slot of ``phase`` on ``worker``; ``move``: its price, if this changes its home and the two
    engines exchange KV; ``lease``: what its action holds, once tools have declared resources."""

    key: str
    phase: Phase
    worker: str
    reason: str
    move: Move | None = None
    lease: LeaseTaken | None = None


class LoadVersion(msgspec.Struct, frozen=True, gc=False):
    """Let the engine of ``worker`` take weights of ``version``; only in runs with one version per trajectory."""

    worker: str
    version: int
    reason: str


class Vacate(msgspec.Struct, frozen=True, gc=False):
    """Let these trajectories, at home on ``worker``, go on on other engines of their version: it is to take newer weights.

    Those that generate there end their turn first, and are named by another command then.
    """

    worker: str
    keys: tuple[str, ...]
    reason: str


class OpenGate(msgspec.Struct, frozen=True, gc=False):
    """Let iteration ``iteration`` begin."""

    iteration: int
    reason: str


class OpenBatch(msgspec.Struct, frozen=True, gc=False):
    """Let step ``batch`` train on these groups, given as (iteration, group)."""

    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


class OpenWave(msgspec.Struct, frozen=True, gc=False):
    """Let wave ``wave`` of step ``batch`` train on these groups, given as (iteration, group).

    Without members: the waves before it have all groups of the batch.
    """

    batch: int
    wave: int
    members: tuple[tuple[int, int], ...]
    reason: str


Event = (
    TrajectoryParked
    | GroupsNamed
    | QuantumStarted
    | QuantumFinished
    | HomeForgotten
    | TrajectoryEnded
    | VersionPublished
    | WorkerJoined
    | WorkerLeft
    | BoundariesSet
    | KVTransferred
    | ToolsDeclared
    | ToolCapacity
    | ActionRequested
)
Command = SetPriority | Prefer | Place | OpenGate | OpenBatch | OpenWave | Turn | TakeSteps | LoadVersion | Vacate
