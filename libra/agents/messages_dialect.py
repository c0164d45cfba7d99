"""Anthropic's messages: lists of blocks, with tools' results in the user's turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra.agents.chat_dialect import Body, common, read_tools, sse, stops, whole
from libra.agents.messages import Call, Message, canonical_arguments, text_of
from libra.agents.requests import ModelRequest, Reply
from libra.errors import RequestRefused

_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(body: Body) -> ModelRequest:
    """A request of ``/messages``; RequestRefused if it cannot be answered as it is."""
    given = body.get("messages")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise RequestRefused("messages: a list with at least one message is needed", "messages")
    messages = [Message("system", text_of(body["system"], "system"))] if body.get("system") else []
    for index, message in enumerate(given):
        messages += _read(message, f"messages[{index}]")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    return ModelRequest(
        "messages",
        tuple(messages),
        tools=read_tools(
            {"tools": body.get("tools"), "tool_choice": kind if kind in ("auto", "any", "none") else None}
        ),
        max_tokens=whole(body, "max_tokens", None),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        stream=bool(body.get("stream")),
        **common(body),
    )


def _read(given: Any, where: str) -> list[Message]:
    """A message; a user's turn may hold results of several tools, each of which is a message."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"{where}.role: got {role!r}; allowed are user and assistant", where)
    content = given.get("content")
    if content is None or isinstance(content, str):
        return [Message(role, content or "")]
    if not isinstance(content, Sequence):
        raise RequestRefused(f"{where}.content: text, or a list of blocks, is needed", where)
    texts, thoughts = list[str](), list[str]()
    calls, results = list[Call](), list[Message]()
    for index, block in enumerate(content):
        place, kind = f"{where}.content[{index}]", block.get("type") if isinstance(block, Mapping) else None
        match kind:
            case "text":
                texts.append(text_of([block], place))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "tool_use" if isinstance(block.get("name"), str):
                calls.append(Call(str(block.get("id") or ""), block["name"], canonical_arguments(block.get("input"))))
            case "tool_result":
                said = text_of(block.get("content"), place)
                results.append(Message("tool", said, (), str(block.get("tool_use_id") or "")))
            case _:
                raise RequestRefused(
                    f"{place}.type: got {kind!r}; allowed are text, thinking, tool_use, tool_result", place
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
            first, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        else:
            name = block["type"]
            first, delta = {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}
        yield sse({"type": "content_block_start", "index": index, "content_block": first}, "content_block_start")
        yield sse({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield sse({"type": "message_delta", "delta": end, "usage": answer["usage"]}, "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")
