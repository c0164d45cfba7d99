"""A request of an agent, whatever dialect it came in, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.messages import Call, Message, canonical_json, digest
from libra.types import ToolCall


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What an agent asks the model for.

    Attributes
    ----------
    dialect : str
        "chat", "responses", "messages" or "generate": how the answer is written.
    messages : tuple of Message
    tools : tuple of JSON schemas
    template_args : mapping
        Further variables of the chat template (``chat_template_kwargs``).
    tools_text : str
        One text for equal tools and template arguments (`libra.agents.conversation.tools_text`).
    size : int
        Bytes of its body.
    max_tokens : int or None
        None: as many as the run allows.
    stop : tuple of str
        Texts that end the generation; they are no part of the content.
    stream, usage : bool
        Whether the answer is a stream of events, and whether that ends with the counts of tokens.
    model : str
        As the client calls it; it comes back as it was.
    token_ids : tuple of int or None
        The whole context of a "generate" request, which has no messages.
    logprobs, return_ids : bool
        Whether the answer of a chat request has log-probabilities, and token ids.
    ignored : tuple of str
        Parameters that the run decides, and the client asked otherwise.
    """

    dialect: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    tools_text: str = ""
    size: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    model: str = "policy"
    token_ids: tuple[int, ...] | None = None
    logprobs: bool = False
    return_ids: bool = False
    ignored: tuple[str, ...] = ()
    _fingerprint: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def fingerprint(self) -> bytes:
        """Equal for requests that would be answered alike."""
        if not self._fingerprint:  # it takes long for long ones
            self._fingerprint.append(self._digest())
        return self._fingerprint[0]

    def _digest(self) -> bytes:
        keys = b"".join([message.key for message in self.messages])
        ids = b"" if self.token_ids is None else np.array(self.token_ids, np.int64).tobytes()
        limits = repr((self.max_tokens, self.stop)).encode()
        return digest(self.tools_text.encode(), b"/", keys, b"/", ids, b"/", limits)


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated turn.

    Attributes
    ----------
    message : Message
    finish : "stop", "length" or "tool_calls"
    prompt_tokens : int
    token_ids, logprobs, versions : arrays (T,)
        As the engine gave them: ids, behaviour log-probabilities in nats, weight versions.
    stop : str or None
        The client's stop text, which ended it.
    """

    message: Message
    finish: str
    prompt_tokens: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    name: str
    stop: str | None = None


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END = "<think>", "</think>"

Parse = Callable[[str], Sequence[ToolCall]]
"""Reads the calls in a text, malformed ones with an error."""


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and the rest."""
    head, found, rest = text.partition(_END)
    before, opened, inner = head.partition(_THINK)
    if not found:
        return ("", text) if not opened or before.strip() else (inner.strip(), "")
    if opened and before.strip():
        return "", text
    return (inner if opened else head).strip(), rest.lstrip("\n")


def reply(text: str, parse: Parse, call_id: Callable[[int], str], stop: str | None = None) -> Message:
    """The message of one generated turn; ``stop``: it ended with this text of the client's, which is no part of the content."""
    if stop is not None and text.endswith(stop):
        text = text[: len(text) - len(stop)]
    reasoning, rest = split_reasoning(text)
    calls = parse(rest)
    if not calls or any(call.error is not None for call in calls):
        return Message("assistant", rest, (), "", reasoning)
    made = tuple(Call(call_id(i), call.name, canonical_json(dict(call.arguments))) for i, call in enumerate(calls))
    before, after = rest.partition(OPEN)[0].strip(), rest.rpartition(CLOSE)[2].strip()
    content = "\n".join(part for part in (before, after) if part)
    return Message("assistant", content, made, "", reasoning)


def forms(message: Message, stop: str | None) -> tuple[Message, ...]:
    """How clients may send a message back: with the stop text, or without."""
    if stop is None:
        return (message,)
    return message, Message("assistant", message.text + stop, message.calls, "", message.reasoning)
