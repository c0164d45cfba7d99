"""Messages, requests and replies of agents in one form for all dialects.

Two messages are equal if the model would read the same text. Null, "" and an absent content are
equal, as are text and a list of text parts, ``developer`` and ``system``, and arguments with the
same JSON value. A comparison ignores unknown fields, ids of calls, and white space around an
assistant's text, which clients strip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import RequestRefused
from libra.types import ToolCall
from libra.untrusted import MAX_DEPTH, storable

ROLES = ("system", "user", "assistant", "tool")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END = "<think>", "</think>"

Parse = Callable[[str], Sequence[ToolCall]]
"""Reads the calls in a text, malformed ones with an error."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant's message; ``arguments`` is JSON, or malformed client text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation; ``role`` is one of `ROLES`.

    ``call_id`` of a tool's message names the call that the message answers. Comparisons include
    ``reasoning`` if the client sent it.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    reasoning: str = ""

    @cached_property
    def key(self) -> bytes:
        """Equal for equal messages."""
        text = self.text.strip() if self.role == "assistant" else self.text
        calls = [[call.name, call.arguments] for call in self.calls]
        return digest(json.dumps([self.role, text, calls, self.reasoning.strip()]).encode())

    def as_chat(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        chat: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.role == "tool":
            chat |= {"name": "tool", "tool_call_id": self.call_id}
        if self.reasoning:
            chat["reasoning_content"] = self.reasoning
        if self.calls:
            chat["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _parsed(c.arguments)}}
                for c in self.calls
            ]
        return chat

    def to_plain(self) -> list[Any]:
        """Plain data for a record; `from_plain` reads it."""
        calls = [[call.id, call.name, call.arguments] for call in self.calls]
        return [self.role, self.text, calls, self.call_id, self.reasoning]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Message:
        """The inverse of `to_plain`."""
        role, text, calls, call_id, reasoning = plain
        return cls(role, text, tuple(Call(*call) for call in calls), call_id, reasoning)


@dataclass(frozen=True)
class ModelRequest:
    """A request of an agent to the model."""

    dialect: str  # chat, responses, messages or generate
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    tools_text: str = ""  # `tools_text` of the two
    size: int = 0  # bytes of its body
    max_tokens: int | None = None  # None: as many as the run permits
    stop: tuple[str, ...] = ()  # texts that end the generation; the content does not have them
    stream: bool = False
    usage: bool = False  # whether a stream ends with the numbers of tokens
    model: str = "policy"  # the client's name for the model, which the answer repeats
    token_ids: tuple[int, ...] | None = None  # the whole context of a "generate" request, which has no messages
    logprobs: bool = False  # whether the answer to a chat request has log-probabilities
    return_ids: bool = False  # and token ids
    ignored: tuple[str, ...] = ()  # parameters of the client that the run decides

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal for requests with the same answer."""
        keys = b"".join([message.key for message in self.messages])
        ids = b"" if self.token_ids is None else np.array(self.token_ids, np.int64).tobytes()
        limits = repr((self.max_tokens, self.stop)).encode()
        return digest(self.tools_text.encode(), b"/", keys, b"/", ids, b"/", limits)


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated turn, with arrays (T,) of the engine."""

    message: Message
    finish: str  # stop, length or tool_calls
    prompt_tokens: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # behaviour log-probabilities in nats
    versions: NDArray[np.int32]  # of the weights
    name: str
    stop: str | None = None  # the client's stop text that ended it


def digest(*parts: bytes) -> bytes:
    """128 bits of the parts, in order."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def canonical_json(value: Any) -> str:
    """One text for each JSON value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def tools_text(tools: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> str:
    """One text for equal tools, in their order, and equal template arguments."""
    return canonical_json([list(tools), dict(args)])


def offers_tools(text: str) -> bool:
    """Whether a text of `tools_text` has tools."""
    return not text.startswith("[[],")


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def canonical_arguments(arguments: Any) -> str:
    """A call's arguments, JSON text or a value, in one storable form; malformed text stays
    unchanged. RequestRefused if they exceed `MAX_DEPTH`."""
    value = _parsed(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if isinstance(value, str) and value == arguments:
        return value
    return storable(canonical_json(bounded(value, "arguments")))


def bounded(value: Any, where: str) -> Any:
    """``value``, if its lists and objects have at most `MAX_DEPTH` levels; else RequestRefused."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        depth += bool(inner)
    if depth > MAX_DEPTH:
        raise RequestRefused(f"{where}: more than {MAX_DEPTH} levels of lists and objects", where)
    return value


# ---------------------------------------------------------------- messages of generated text


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and the remaining text."""
    head, found, rest = text.partition(_END)
    before, opened, inner = head.partition(_THINK)
    if not found:
        return ("", text) if not opened or before.strip() else (inner.strip(), "")
    if opened and before.strip():
        return "", text
    return (inner if opened else head).strip(), rest.lstrip("\n")


def reply(text: str, parse: Parse, call_id: Callable[[int], str], stop: str | None = None) -> Message:
    """The message of one generated turn, without the client's text ``stop`` that ended it."""
    reasoning, rest = split_reasoning(text.removesuffix(stop or ""))
    calls = parse(rest)
    if not calls or any(call.error is not None for call in calls):
        return Message("assistant", rest, (), "", reasoning)
    made = tuple(Call(call_id(i), call.name, canonical_json(dict(call.arguments))) for i, call in enumerate(calls))
    before, after = rest.partition(OPEN)[0].strip(), rest.rpartition(CLOSE)[2].strip()
    content = "\n".join(part for part in (before, after) if part)
    return Message("assistant", content, made, "", reasoning)


def forms(message: Message, stop: str | None) -> tuple[Message, ...]:
    """The forms in which clients may send a message back: with the stop text, and without it."""
    if stop is None:
        return (message,)
    return message, Message("assistant", message.text + stop, message.calls, "", message.reasoning)
