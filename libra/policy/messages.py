"""What a policy is told (events, past tense) and what it answers (commands, imperative, each with its reason)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from libra.types import Phase, ToolOutcome

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _message(kind: type[T]) -> type[T]:
    """A value that nobody changes; the type checker sees to that. A frozen one takes three times as long to make."""
    return dataclass(slots=True, unsafe_hash=True)(kind)


class Priority(NamedTuple):
    """Order of parked tasks, compared left to right, smaller first. It is what ``ts.priority`` holds in the scheduler."""

    deadline: int  # iteration that must not wait for later ones
    level: int  # MLFQ level, 0 first; -1 is overdue
    order: int  # within a level


@_message
class TrajectoryParked:
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


@dataclass(frozen=True, slots=True)
class GroupsNamed:
    """Groups that are to come are of these prompts, as (group, prompt); a prompt has the same name whenever it comes again."""

    groups: tuple[tuple[str, str], ...]


def groups_named(split: str, iteration: int, prompts: Sequence[str]) -> GroupsNamed:
    """`GroupsNamed` of an iteration whose group ``k`` is of ``prompts[k]``, by the names that the scheduler gives to groups."""
    return GroupsNamed(tuple((f"{split}-{iteration}-{k}", prompt) for k, prompt in enumerate(prompts) if prompt))


@_message
class QuantumStarted:
    """A parked trajectory was given a slot of ``phase`` on ``worker``; its KV is there from now on, if it generates."""

    key: str
    phase: Phase
    worker: str


@_message
class QuantumFinished:
    """A quantum was committed: a generation of ``tokens`` tokens, or an action whose tool came back with ``status``.

    A generation whose tools ran inline names them too; ``status`` is `NO_TOOL` where none came back. ``tool`` may be empty where
    one did: a malformed call need not name any. ``payload_tokens`` are those that the tools put into the context.
    """

    key: str
    phase: Phase
    tokens: int
    tool: str
    status: ToolOutcome
    latency_s: float
    payload_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HomeForgotten:
    """What an engine holds of a trajectory is not wanted any more: its last attempt there failed."""

    key: str


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """A trajectory is over; the policy may forget it.

    ``completed`` is false where it failed or was given up: its length says nothing.
    """

    key: str
    completed: bool = True


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The weights changed: what was learned about lengths is of an older policy."""

    version: int


@dataclass(frozen=True, slots=True)
class BoundariesSet:
    """A plan means these buckets for these lengths: pairs (TP degree, generated tokens), ascending in both.

    Up to so many tokens a trajectory had best begin on engines of that degree; longer than all, on engines of a higher one.
    Empty: nothing is planned.
    """

    boundaries: tuple[tuple[int, float], ...]


def boundaries_of(tokens: Mapping[Any, float]) -> tuple[tuple[int, float], ...]:
    """Boundaries as a configuration has them (``{"tp1": 3000}``), for `BoundariesSet`."""
    return tuple(sorted((int(name.removeprefix("tp")), float(end)) for name, end in tokens.items()))


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker takes quanta from now on; one that is known already has changed.

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
        Seconds per generated token of a trajectory that is alone in the engine, and of one when its slots are taken and its KV
        memory is full; 0: not known, and then nothing is known of its speed.
    prefill_s_per_token : float
        Seconds to compute the KV of one token of context again.
    beside_s_per_token : float
        Seconds that each other generation running there adds to a token, however short its context is; the rest of what a full
        engine is slower by goes with the KV held.
    max_context_tokens : int
        Longest context of one trajectory, whatever is believed of it; 0: not known.
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

    @property
    def told(self) -> bool:
        """Whether its engine has said what it holds and how fast it is: where it has not, nothing is placed by lengths."""
        return self.kv_tokens > 0 and self.alone_s_per_token > 0.0

    @property
    def context_s_per_token(self) -> float:
        """Seconds that each token of context at home there adds to a generated one; `told` must be true."""
        beside_s = self.beside_s_per_token * max(0, self.rollout_slots - 1)
        return max(0.0, self.full_s_per_token - self.alone_s_per_token - beside_s) / self.kv_tokens


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone, and with it all KV that it held; what ran there is parked again."""

    worker: str


@_message
class SetPriority:
    """Give a parked trajectory this place in the order."""

    key: str
    priority: Priority
    reason: str


@_message
class Prefer:
    """Let a parked trajectory take slots of these buckets: beside those of its home, or before others where it has none.

    It is believed to generate ``left_tokens`` more, and to reach ``final_tokens`` of context; 0: nothing is believed. Where it
    has no home it had best begin on engines of degree ``begins_tp``, or of the next higher one that is there; 0: anywhere.
    """

    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int = 0
    final_tokens: int = 0
    begins_tp: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Give a parked trajectory a slot of ``phase`` on ``worker``."""

    key: str
    phase: Phase
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Let iteration ``iteration`` begin."""

    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """Let step ``batch`` train on these groups, given as (iteration, group)."""

    batch: int
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
)
Command = SetPriority | Prefer | Place | OpenGate | OpenBatch
