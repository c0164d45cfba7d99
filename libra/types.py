"""Value types shared by every part of Libra, without I/O, clock, torch or dask.

The hierarchy is run > iteration > group (one prompt, G samples) > trajectory > turn (one
generation, then at most one round of tool calls). A *quantum* is uninterrupted work of a trajectory
on one worker: a generation, or a chunk of `rollout.chunk_tokens` (ROLLOUT slot), or an action (TOOL
slot). A *version* counts published weights; version 0 is what the run started from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Late:
    """A reward function's result whose value comes later, by `libra.deliver`; see ``trainer.late``.

    The reward is ``offset + factor x value``; until delivery ``value`` is the provisional ``fast``,
    if given. A weighted sum with at most one late term is late too.
    """

    fast: float | None = None
    offset: float = 0.0
    factor: float = 1.0

    @property
    def provisional(self) -> float | None:
        """The reward until delivery; None without a provisional value."""
        return None if self.fast is None else self.offset + self.factor * self.fast

    def __add__(self, other: object) -> Late:
        if isinstance(other, Late):
            raise TypeError("two rewards of a sum are libra.Late; one may be, because one value is delivered")
        if not isinstance(other, int | float):
            return NotImplemented
        return Late(self.fast, self.offset + float(other), self.factor)

    __radd__ = __add__

    def __mul__(self, weight: object) -> Late:
        if not isinstance(weight, int | float):
            return NotImplemented
        return Late(self.fast, self.offset * weight, self.factor * weight)

    __rmul__ = __mul__


class Drawn(NamedTuple):
    """M more tokens drawn at each of T places: int32 (T, M); log-probs in nats, float32 (T, M)."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Taught(NamedTuple):
    """A teacher's log-probabilities at a trajectory's A generated tokens.

    All are float32, in nats, at the run's temperature. ``token_ids`` int32 (A, K): tokens scored at
    each place; ``logp`` (A, K): their log-probabilities; ``own_logp`` (A,): the generated token's;
    ``rest_logp`` (A,): all other tokens' together, with a top-k; ``old_logp`` (A, K): the
    student's, with draws of the student.
    """

    token_ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    own_logp: NDArray[np.float32]
    rest_logp: NDArray[np.float32] | None = None
    old_logp: NDArray[np.float32] | None = None

    def only(self, kept_A: NDArray[np.bool_]) -> Taught:
        """The entries of the tokens that are True in ``kept_A``."""
        return Taught(*(None if each is None else each[kept_A] for each in self))  # type: ignore[arg-type]


class Phase(StrEnum):
    """The Dask resource of which a trajectory's next quantum takes one slot."""

    ROLLOUT = "ROLLOUT"
    TOOL = "TOOL"


class StopReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"  # the model ended its turn
    LENGTH = "length"  # max_new_tokens reached
    ABORT = "abort"  # abort() was called
    PARKED = "parked"  # rollout.chunk_tokens reached: the turn goes on in the trajectory's next quantum


class EndReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # a turn without a tool call
    LENGTH = "length"  # a turn was cut at max_new_tokens, or the context is full
    MAX_TURNS = "max_turns"
    FAILURE = "failure"  # see the failure class


class Boundary(StrEnum):
    """Failure boundaries. Every failure belongs to exactly one boundary."""

    INFRASTRUCTURE = "infrastructure"  # machines, processes, engines
    TIMEOUT = "timeout"  # a tool or a grader exceeded its time limit, and its environment calls that fatal
    TOOL = "tool"  # tools and environment
    GRADER = "grader"
    POLICY = "policy"  # the model; only these failures enter the gradient


class FailureClass(StrEnum):
    """A trajectory's failure (``docs/failures.md``). Only ``none`` and ``policy`` may train."""

    NONE = "none"
    POLICY = "policy"  # caused by the model: malformed calls to the end, cut by length, too many turns
    TOOL = "tool"  # a tool failed in a way that the model must not read
    TIMEOUT = "timeout"  # a tool exceeded a fatal time limit, or the grader did not return
    ENVIRONMENT = "environment"  # no prompt, one that does not fit, or its parser failed
    REWARD = "reward"  # the grader raised, or returned no finite number
    ENGINE = "engine"
    WORKER = "worker"  # three processes died under the same quantum

    @property
    def boundary(self) -> Boundary | None:
        return _BOUNDARIES[self]

    @property
    def trains(self) -> bool:
        return self.boundary in (None, Boundary.POLICY)

    @property
    def keeps_records(self) -> bool:
        """Whether a retry continues from committed quanta: if tokens cannot cause the failure."""
        return self is FailureClass.ENGINE


_BOUNDARIES: Mapping[FailureClass, Boundary | None] = {
    FailureClass.NONE: None,
    FailureClass.POLICY: Boundary.POLICY,
    FailureClass.TOOL: Boundary.TOOL,
    FailureClass.TIMEOUT: Boundary.TIMEOUT,
    FailureClass.ENVIRONMENT: Boundary.TOOL,
    FailureClass.REWARD: Boundary.GRADER,
    FailureClass.ENGINE: Boundary.INFRASTRUCTURE,
    FailureClass.WORKER: Boundary.INFRASTRUCTURE,
}


class ToolStatus(StrEnum):
    """Outcome of a tool call, for the model to read; ends no trajectory unless a tool is fatal."""

    OK = "ok"
    ERROR = "error"  # the tool raised, or reported an error of its own
    TIMEOUT = "timeout"
    MALFORMED = "malformed"  # the call was not valid JSON, or named no known tool
    TRUNCATED = "truncated"  # the tool returned more than max_payload_chars; the rest was dropped


NO_TOOL: Final = ""
"""In place of a `ToolStatus`, if no tool returned."""

ToolOutcome = ToolStatus | Literal[""]
"""Outcome of a turn's tools, or `NO_TOOL`; the same words in logs, stores, traces and policies."""

_OUTCOMES: Mapping[str, ToolOutcome] = {NO_TOOL: NO_TOOL, **{str(status): status for status in ToolStatus}}


def tool_outcome(word: str) -> ToolOutcome:
    """The outcome by its word in Libra's files; ValueError for any other word."""
    try:
        return _OUTCOMES[word]
    except KeyError:
        raise ValueError(
            f"status {word!r} is not a tool outcome; allowed are {', '.join(ToolStatus)}, and nothing if no tool returned"
        ) from None


def turn_outcome(statuses: Iterable[ToolStatus]) -> ToolOutcome:
    """Outcome of a turn's calls: the first that is not `ToolStatus.OK`; `NO_TOOL` without calls."""
    outcome: ToolOutcome = NO_TOOL
    for status in statuses:
        if status is not ToolStatus.OK:
            return status
        outcome = status
    return outcome


class TrajectoryId(NamedTuple):
    """A trajectory's position in its run; with ``split`` "eval", ``iteration`` is the version."""

    iteration: int
    group: int
    sample: int
    split: str = "train"

    def __str__(self) -> str:
        return f"{self.split}-{self.iteration}-{self.group}-{self.sample}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Chat messages for the model, and JSON-able facts for tools and grader.

    ``prompt_id`` is stable, and unique within an environment and split.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call parsed from generated text; for malformed text only ``error`` is set."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """Result of one call. The model reads ``content``; ``latency_s`` is wall time of the call.

    ``reference`` names the file of a large result (`libra.observation`). ValueError if ``status``
    is not a `ToolStatus`.
    """

    tool: str
    status: ToolStatus
    content: str
    latency_s: float = 0.0
    payload_chars: int = 0
    reference: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.status, ToolStatus):
            raise ValueError(
                f"ToolReturn of {self.tool!r}: status {self.status!r}; it is one of "
                f"{', '.join(f'ToolStatus.{status.name}' for status in ToolStatus)}"
            )


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One generation requested from an engine.

    * ``trajectory_id`` names the KV cache to reuse; a later request of the trajectory extends an
      earlier one.
    * ``turn`` is 0-based. ``priority``: smaller is served first when the engine is full.
    * ``context_ids``, int32 (T,): the whole context: prompt, earlier generations, observations.
    * ``temperature`` 1.0 is the model's own distribution; 0 is greedy.
    * ``stop_ids``: a generated stop id is kept in the output and ends the turn.
    * ``seed`` is the only randomness: equal seed, context and weights give equal tokens in any
      batch.
    * ``group`` names the prompt's samples, from whose tokens an engine drafts; empty for no drafts.
    * ``generated``: the last context tokens that this turn already generated; sampling continues.
    * ``draws``: further tokens to draw at each place, without other effect.
    """

    trajectory_id: str
    turn: int
    context_ids: NDArray[np.int32]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: tuple[int, ...] = (0,)
    group: str = ""
    generated: int = 0
    draws: int = 0


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """The generation for one request; all arrays have one entry per new token (T,).

    * ``logprobs``, float32: behaviour log-probability in nats, of the distribution sampled from.
    * ``weight_versions``, ``kv_versions``, int32: versions of the weights that produced the token,
      and of the KV cache that it attended to.
    * ``cached_tokens``: context tokens whose KV was cached.
    * ``queued_s``, ``busy_s``, ``prefill_s``: wall seconds before the first forward pass, from then
      to the end, and to the first token (0 if unknown).
    * ``routes``, int16 (P, L, K): experts by layer, of context tokens from ``routes_from`` on and
      of new tokens but the last.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    kv_versions: NDArray[np.int32]
    stop_reason: StopReason
    cached_tokens: int = 0
    queued_s: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    routes: NDArray[np.int16] | None = None
    routes_from: int = 0
    drawn: Drawn | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of an engine's forward pass, fitted by the engine to ``num_steps`` passes.

    A pass takes ``fixed_s + sequence_s x (running sequences) + context_token_s x (sum of their
    contexts) + prefill_token_s x (context tokens computed in it)``. No coefficient is negative.
    ``error_frac`` is the mean of abs(predicted / measured - 1) over passes outside the fit, in sums
    of up to eight consecutive passes.
    """

    fixed_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    num_steps: int
    error_frac: float

    def step_s(self, sequences: float, context_tokens: float, prefill_tokens: float = 0.0) -> float:
        """Seconds of a pass over ``sequences`` with these context and prefill tokens in all."""
        running_s = self.fixed_s + self.sequence_s * sequences + self.context_token_s * context_tokens
        return running_s + self.prefill_token_s * prefill_tokens


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Memory and speed of an engine, as the engine declares them.

    * ``kv_tokens``, ``kv_bytes``, ``kv_token_bytes``: tokens and bytes of KV memory, and bytes per
      token, over all layers and tensor-parallel ranks.
    * ``slots``, ``tp``: trajectories that generate at once, and tensor-parallel degree.
    * ``steps``: measured seconds of its passes; None before enough of them ran.
    * ``max_context_tokens``: longest context of one trajectory; 0 if unknown.
    * ``exchanges_kv``: whether the engine gives and takes KV objects (`rollout.kv_host_gib`).
    """

    kv_tokens: int
    kv_bytes: int
    kv_token_bytes: int
    slots: int
    tp: int
    steps: StepSeconds | None = None
    max_context_tokens: int = 0
    exchanges_kv: bool = False

    @classmethod
    def from_declaration(cls, declared: Mapping[str, Any]) -> EngineCapacity:
        """The capacity from fields of `libra.facts.EngineDeclared`; other fields are ignored."""
        steps = None
        if declared["fixed_s"] is not None:
            steps = StepSeconds(**{each.name: declared[each.name] for each in fields(StepSeconds)})
        sizes = (each.name for each in fields(cls) if each.name not in ("steps", "exchanges_kv"))
        exchanges = bool(declared.get("exchanges_kv", False))
        return cls(**{name: int(declared[name]) for name in sizes}, steps=steps, exchanges_kv=exchanges)

    def declaration(self) -> dict[str, Any]:
        """Flat fields for `from_declaration`; ``steps`` fields are None before measurements."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "steps"}
        if self.steps is not None:
            return own | asdict(self.steps)
        return own | {each.name: None for each in fields(StepSeconds)} | {"num_steps": 0}


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished trajectory's turn: text (``num_tokens`` tokens, ``token_ids``), calls, results."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    returns: tuple[ToolReturn, ...] = ()
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished trajectory as the grader sees it."""

    trajectory_id: str
    prompt: Prompt
    turns: tuple[Turn, ...]
    end_reason: EndReason
    state: Any = None  # of an environment that has one, after the last turn
    result: Any = None  # what an agent returned, or its command printed; None without an agent
    own_reward: float | None = None  # what an agent gave itself, by its result or at its gateway's /reward

    @property
    def answer(self) -> str:
        """Text of the last turn, or empty."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)


def start_of(turn: Mapping[str, Any]) -> int:
    """First token, in its trajectory, of the sequence that trains a turn; 0 if there is one."""
    return max(0, int(turn.get("sequence_start", 0)))


@dataclass(slots=True)
class Trajectory:
    """A finished trajectory with every token, as the store keeps it and the trainer reads it.

    * ``token_ids``, ``is_action``, ``behaviour_logprob``, ``weight_version``, ``kv_version``,
      arrays (T,): one entry per token of prompt, generations and observations. ``is_action`` marks
      generated tokens; elsewhere log-probability is 0 and versions are -1.
    * ``turns``: one flat, JSON-able row per turn: turn, tool, status, num_calls, prompt_tokens,
      generated_tokens, observation_tokens, stop_reason, generate_s, queued_s, tool_s, worker,
      text_chars, payload_chars, sequence_start.
    * ``reward``: NaN for failure classes that do not train.
    * ``retried``: failure classes of earlier attempts, in order, joined by commas.
    * ``late``: ``offset`` and ``factor`` of a late reward (`Late`), or None; until it comes
      ``reward`` is provisional or missing.
    * ``counted``: whether its step's denominators count it; false for late corrections.
    * ``routes``, int16 (T, layers, experts per token): experts that the engine chose
      (``trainer.routes=replay``); -1 if not recorded.
    """

    trajectory_id: TrajectoryId
    prompt: Prompt
    token_ids: NDArray[np.int32]
    is_action: NDArray[np.bool_]
    behaviour_logprob: NDArray[np.float32]
    weight_version: NDArray[np.int32]
    kv_version: NDArray[np.int32]
    turns: list[dict[str, Any]]
    end_reason: EndReason
    failure: FailureClass = FailureClass.NONE
    failure_detail: str = ""
    reward: float = float("nan")
    advantage: float = 0.0
    epoch: int = 0
    retried: str = ""
    late: list[float] | None = None
    counted: bool = True
    routes: NDArray[np.int16] | None = None
    drawn: Drawn | None = None
    taught: Taught | None = None

    def take_late(self, value: float) -> None:
        """Set the reward from the ``value`` delivered for a late reward."""
        assert self.late is not None, f"{self.trajectory_id} has its reward"
        offset, factor = self.late
        self.reward, self.failure, self.failure_detail = offset + factor * value, FailureClass.NONE, ""

    @property
    def starts(self) -> tuple[int, ...]:
        """First tokens of all sequences but the first, if an agent's conversation has branches."""
        return tuple(sorted({start_of(turn) for turn in self.turns} - {0}))

    @property
    def num_action_tokens(self) -> int:
        """Generated tokens."""
        return int(self.is_action.sum())

    @property
    def attempt(self) -> int:
        """Number of failed attempts before this one."""
        return len(self.retried.split(",")) if self.retried else 0

    @property
    def oldest_version(self) -> int:
        """Oldest weight version among generated tokens; -1 without any."""
        return int(self.weight_version[self.is_action].min()) if self.is_action.any() else -1
