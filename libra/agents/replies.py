"""Generated text as the message that an agent gets: content, reasoning and tool calls.

Rules
-----
1. Text in ``<think>`` is reasoning, and calls in it are none. An opening tag that the template wrote need not be in the text; one
   that is never closed makes all of the text reasoning.
2. If one call of a turn is malformed, the turn has no calls, and its text is the content: the agent decides what to make of it.
3. The text before the first call and after the last one is the content.
4. The ids of calls are those of the turn, so that the same turn gives the same ids after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra.agents.messages import Call, Message, canonical_json
from libra.types import ToolCall

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
