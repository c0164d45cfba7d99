"""OpenAI's responses: text, function calls, and their outputs. No answer is kept between
requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from libra.agents.chat_dialect import ChatMessage, StrictFormat, request_of, sse
from libra.agents.messages import Call, Message, ModelRequest, Reply, canonical_arguments
from libra.agents.request_bodies import Content, Known, Part, Sampling, decoded, text_of, whole
from libra.errors import RequestRefused


class _Item(ChatMessage, kw_only=True):
    type: str | None = None
    summary: list[str | Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: Content = None


class _Text(msgspec.Struct):
    format: StrictFormat | None = None


class _Body(Sampling, kw_only=True):
    input: str | list[_Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    previous_response_id: Any = None
    conversation: Any = None


def read_responses(data: bytes, known: Known) -> ModelRequest:
    """A request of ``/responses``; RequestRefused if a run cannot answer it."""
    body = decoded(_Body, data)
    if body.previous_response_id or body.conversation:
        name = "previous_response_id" if body.previous_response_id else "conversation"
        raise RequestRefused(f"{name}: answers are not kept here; send the whole input", name)
    if body.text is not None and body.text.format is not None:
        body.text.format.refuse_strict("text.format")
    messages = [Message("system", body.instructions)] if body.instructions else []
    given = [_Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not given:
        raise RequestRefused("input: a text, or a list with at least one item, is needed", "input")
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    limit = whole(body.max_output_tokens, "max_output_tokens")
    return request_of("responses", body, tuple(messages), size=len(data), max_tokens=limit)


def _add(messages: list[Message], item: _Item, where: str) -> None:
    """Add one item; the items of an assistant's turn (reasoning, text, calls) become one
    message."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    match item.type or "message":
        case "message":
            message = item.message(where)
            if message.role == "assistant" and last is not None and not last.text and not last.calls:
                messages[-1] = replace(last, text=message.text)
            else:
                messages.append(message)
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            messages.append(Message("assistant", "", (), "", text_of([*parts, *(item.summary or ())], where)))
        case "function_call":
            if item.name is None:
                raise RequestRefused(f"{where}.name: the function's name is needed", where)
            call = Call(item.call_id or "", item.name, canonical_arguments(item.arguments))
            if last is None:
                messages.append(Message("assistant", "", (call,)))
            else:
                messages[-1] = replace(last, calls=(*last.calls, call))
        case "function_call_output":
            messages.append(Message("tool", text_of(item.output, where), (), item.call_id or ""))
        case kind:
            raise RequestRefused(
                f"{where}.type: got {kind!r:.200}; allowed are message, reasoning, function_call and its output", where
            )


def write_responses(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    output: list[dict[str, Any]] = []
    if reply.message.reasoning:
        content = [{"type": "reasoning_text", "text": reply.message.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{reply.name}", "summary": [], "content": content})
    if reply.message.text or not reply.message.calls:
        text = {"type": "output_text", "text": reply.message.text, "annotations": []}
        own = {"role": "assistant", "status": "completed", "content": [text]}
        output.append({"type": "message", "id": f"msg_{reply.name}", **own})
    for call in reply.message.calls:
        own = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        output.append({"type": "function_call", "id": f"fc_{call.id}", **own})
    prompt, made = reply.prompt_tokens, len(reply.token_ids)
    usage = {
        "input_tokens": prompt, "output_tokens": made, "total_tokens": prompt + made,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    cut = reply.finish == "length"
    return {
        "id": f"resp_{reply.name}", "object": "response", "created_at": int(time.time()), "model": request.model,
        "status": "incomplete" if cut else "completed", "error": None, "instructions": None, "metadata": {},
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": output, "usage": usage,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None,
    }  # fmt: skip


def stream_responses(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """The events of a streamed answer."""
    whole_answer = write_responses(request, reply)
    begun = {**whole_answer, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole_answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, **_EMPTY[item["type"]], "status": "in_progress"},
            }
        )
        if item["type"] == "message":
            part, at = item["content"][0], {**place, "content_index": 0}
            empty = {**part, "text": ""}
            events += [
                {"type": "response.content_part.added", **at, "part": empty},
                {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **at, "part": part},
            ]
        elif item["type"] == "function_call":
            said = item["arguments"]
            events += [
                {"type": "response.function_call_arguments.delta", **place, "delta": said},
                {"type": "response.function_call_arguments.done", **place, "arguments": said, "name": item["name"]},
            ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    end = "response.incomplete" if whole_answer["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": whole_answer})
    for number, event in enumerate(events):
        yield sse({**event, "sequence_number": number}, event["type"])


_EMPTY: Mapping[str, dict[str, Any]] = {
    "message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"content": []},
}  # fmt: skip
