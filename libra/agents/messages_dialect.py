"""Anthropic's messages: lists of blocks, with results of tools in the user's turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from libra.agents.chat_dialect import request_of, sse
from libra.agents.messages import Call, Message, ModelRequest, Reply, canonical_arguments
from libra.agents.request_bodies import Content, Known, Sampling, decoded, stops, text_of, whole
from libra.errors import RequestRefused

_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Content = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | list[_Block] | None = None


class _Body(Sampling, kw_only=True):
    messages: list[_Message] = []
    system: Content = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


def read_messages(data: bytes, known: Known) -> ModelRequest:
    """A request of ``/messages``; RequestRefused if a run cannot answer it."""
    body = decoded(_Body, data)
    if not body.messages:
        raise RequestRefused("messages: a list with at least one message is needed", "messages")
    messages = [Message("system", text_of(body.system, "system"))] if body.system else []
    for index, message in enumerate(body.messages):
        messages += _read(message, f"messages[{index}]")
    choice = body.tool_choice.get("type") if isinstance(body.tool_choice, Mapping) else None
    body.tool_choice = choice if choice in ("auto", "any", "none") else None
    limit, stop = whole(body.max_tokens, "max_tokens"), stops(body.stop_sequences, "stop_sequences")
    return request_of("messages", body, tuple(messages), size=len(data), max_tokens=limit, stop=stop)


def _read(given: _Message, where: str) -> list[Message]:
    """A message, and one for each result of a tool in a user's turn."""
    role, content = given.role, given.content
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"{where}.role: got {role!r:.200}; allowed are user and assistant", where)
    if content is None or isinstance(content, str):
        return [Message(role, content or "")]
    texts, thoughts = list[str](), list[str]()
    calls, results = list[Call](), list[Message]()
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        match block.type:
            case "text" if block.text is not None:
                texts.append(block.text)
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use" if block.name is not None:
                calls.append(Call(block.id or "", block.name, canonical_arguments(block.input)))
            case "tool_result":
                results.append(Message("tool", text_of(block.content, place), (), block.tool_use_id or ""))
            case kind:
                raise RequestRefused(
                    f"{place}.type: got {kind!r:.200}; allowed are text, thinking, tool_use, tool_result", place
                )
    if role == "assistant":
        return [Message(role, "".join(texts), tuple(calls), "", "".join(thoughts))]
    return [*results, *([Message(role, "".join(texts))] if texts or not results else [])]


def write_messages(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    content: list[dict[str, Any]] = []
    if reply.message.reasoning:
        content.append({"type": "thinking", "thinking": reply.message.reasoning, "signature": ""})
    if reply.message.text or not reply.message.calls:
        content.append({"type": "text", "text": reply.message.text})
    for call in reply.message.calls:
        given = json.loads(call.arguments, parse_constant=str)  # the model may write NaN, for which JSON has no form
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return {
        "id": f"msg_{reply.name}", "type": "message", "role": "assistant", "model": request.model, "content": content,
        "stop_reason": "stop_sequence" if reply.stop else _FINISH[reply.finish], "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.token_ids)},
    }  # fmt: skip


def stream_messages(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """The events of a streamed answer."""
    answer = write_messages(request, reply)
    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield sse({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(answer["content"]):
        if block["type"] == "tool_use":
            first = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            name = block["type"]
            first, delta = {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}
        yield sse({"type": "content_block_start", "index": index, "content_block": first}, "content_block_start")
        yield sse({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield sse({"type": "message_delta", "delta": end, "usage": answer["usage"]}, "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")
