"""The records of a journal, one per quantum of a trajectory, read by resume, repair and checks.

``state`` is the environment's state after the record, as bytes; None if the environment has no
state, or the state did not change.
"""

from __future__ import annotations

from typing import Any

import msgspec
from numpy.typing import NDArray

from libra.types import EndReason, FailureClass, StopReason, ToolCall, ToolReturn

Array = NDArray[Any]


class QuantumStamp(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Worker, Unix times and start of the run (``epoch``) of one quantum."""

    worker: str = ""
    start_s: float = 0.0
    stop_s: float = 0.0
    epoch: int = -1


class GenerationRecord(QuantumStamp, kw_only=True, tag="generation"):
    """One generation, or one part of an unfinished turn; the last part has text and calls of the
    whole turn.

    Attributes
    ----------
    prompt_ids : int32 array, optional
        Only in the first record of an attempt.
    token_ids, logprobs, weight_versions, kv_versions : arrays of one length
        One entry per generated token; log-probabilities in nats.
    drawn : list of arrays, optional
        The fields of `libra.types.Drawn`.
    routes : int16 array (T, layers, experts per token), optional
        Experts of the tokens from ``routes_from`` on.
    stopped : str, optional
        The client's stop text that ended an agent's turn.
    unstorable : str, optional
        Why text and calls could not be stored: the trajectory ends as a `policy` failure.
    """

    turn: int
    prompt_ids: Array | None = None
    token_ids: Array
    logprobs: Array
    weight_versions: Array
    kv_versions: Array
    stop_reason: StopReason
    cached_tokens: int = 0
    queued_s: float = 0.0
    busy_s: float = 0.0
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    drawn: list[Array] | None = None
    state: bytes | None = None
    routes: Array | None = None
    routes_from: int = 0
    stopped: str | None = None
    unstorable: str | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether another part of the turn follows."""
        return self.stop_reason is StopReason.PARKED


class ActionRecord(QuantumStamp, kw_only=True, tag="action"):
    """The returns of a turn's calls, and the tokens appended for the model to read. ``lease`` is
    worker and name of the trajectory's session. ``ends`` is whether the environment's ``step``
    ended the trajectory."""

    turn: int
    returns: tuple[ToolReturn, ...] = ()
    observation_ids: Array
    state: bytes | None = None
    lease: tuple[str, str] | None = None
    ends: bool = False


class RequestRecord(QuantumStamp, kw_only=True, tag="request"):
    """A request of an agent to the model; the answer becomes turn ``turn``.

    Attributes
    ----------
    parent : int
        The turn that the request continues; -1 for none.
    returns : tuple of ToolReturn
        Returns of the tools of turn ``parent``.
    observation_ids : int32 array
        Tokens that follow turn ``parent``.
    messages, tools : list of lists, str
        The request, from which `libra.agents` restores the conversation after a restart.
    reason : str
        "first", "continued", or why the request starts a branch.
    """

    turn: int
    parent: int
    returns: tuple[ToolReturn, ...] = ()
    observation_ids: Array
    messages: list[list[Any]]
    tools: str
    reason: str
    fingerprint: bytes
    stop: list[str]
    max_tokens: int | None
    by_ids: bool


class AgentEndRecord(QuantumStamp, kw_only=True, tag="agent_end"):
    """The end of an agent, with its ``result`` (JSON; empty for None) and its own reward."""

    turn: int
    end: EndReason
    failure: FailureClass
    detail: str = ""
    result: str = ""
    reward: float | None = None


class FailureRecord(QuantumStamp, kw_only=True, tag="failure"):
    """The end of an attempt without an answer, because of a ``failure``."""

    failure: FailureClass
    detail: str = ""


class RestartRecord(QuantumStamp, kw_only=True, tag="restart"):
    """The restart of a trajectory, by a new version (``began``, ``serves``) or agent request."""

    began: int = -1
    serves: int = -1
    detail: str = ""


QuantumRecord = GenerationRecord | ActionRecord | RequestRecord | AgentEndRecord | FailureRecord | RestartRecord
