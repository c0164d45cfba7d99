"""Dialects of agents' requests: OpenAI chat completions and responses, Anthropic messages, token
ids.

A request that a training run cannot answer is refused with the field's name: several choices,
strict output formats, forced tool calls. The run's sampling parameters replace a client's, which is
logged once. No answer is kept between requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from libra.agents.messages import ROLES, Call, Message, ModelRequest, Reply, canonical_arguments
from libra.agents.request_bodies import (
    RUNS_OWN,
    Content,
    Known,
    Part,
    Sampling,
    decoded,
    offered,
    refuse_choices,
    stops,
    text_of,
    whole,
)
from libra.errors import RequestRefused

Json = dict[str, Any]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Reads the requests of one path and writes the answers, with ``stream`` as events."""

    read: Callable[[bytes, Known], ModelRequest]
    write: Callable[[ModelRequest, Reply], Json]
    stream: Callable[[ModelRequest, Reply], Iterator[bytes]] | None
    ping: bytes = b": waiting\n\n"
    """A heartbeat in a stream."""


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    return (b"event: %s\n" % event.encode() if event else b"") + b"data: %s\n\n" % msgspec.json.encode(data)


def refusal(refused: RequestRefused, *, anthropic: bool) -> Json:
    """An error in the client's dialect."""
    kinds = {
        401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 413: "request_too_large",
        503: "overloaded_error",
    }  # fmt: skip
    error: Json = {"message": str(refused), "type": kinds.get(refused.status, "invalid_request_error")}
    if anthropic:
        return {"type": "error", "error": error}
    return {"error": {**error, "param": refused.param or None, "code": refused.code}}


def _request(dialect: str, body: Sampling, messages: tuple[Message, ...], **more: Any) -> ModelRequest:
    found = offered(body)
    return ModelRequest(
        dialect, messages, tools=found.tools, template_args=found.args, tools_text=found.text, stream=bool(body.stream),
        model=body.model or "policy", ignored=tuple([name for name in RUNS_OWN if getattr(body, name) is not None]), **more,
    )  # fmt: skip


def _need_messages(given: Any, name: str = "messages") -> None:
    if not given:
        raise RequestRefused(f"{name}: a list with at least one entry is needed", name)


class _StrictFormat(msgspec.Struct):
    strict: bool | None = None
    json_schema: _StrictFormat | None = None

    def refuse(self, where: str) -> None:
        """RequestRefused for an enforced format, which would change the trained distribution."""
        if self.strict or (self.json_schema is not None and self.json_schema.strict):
            message = (
                f"{where}: a strict schema would change the model's samples; send strict: false, or check the answer"
            )
            raise RequestRefused(f"{message} in the agent", where)


# ---------------------------------------------------------------- chat completions, and token ids


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _ChatMessage(msgspec.Struct):
    role: str = ""
    content: Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    def message(self, where: str) -> Message:
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        if role not in ROLES:
            raise RequestRefused(
                f"{where}.role: got {self.role!r:.200}; allowed are {', '.join(ROLES)}, developer", where
            )
        text = text_of(self.content, where)
        if role != "assistant":
            return Message(role, text, (), (self.tool_call_id or "") if role == "tool" else "")
        calls = tuple(
            Call(call.id or "", call.function.name, canonical_arguments(call.function.arguments))
            for call in self.tool_calls or ()
        )
        reasoning = self.reasoning_content or self.reasoning
        return Message(role, text, calls, "", reasoning if isinstance(reasoning, str) else "")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ChatBody(Sampling, kw_only=True):
    messages: list[msgspec.Raw] = []
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: _StreamOptions | None = None
    response_format: _StrictFormat | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class _Limits(msgspec.Struct):
    max_tokens: int | None = None
    n: Any = None
    best_of: Any = None


class _GenerateBody(Sampling, kw_only=True):
    token_ids: list[TokenId] = []
    sampling_params: _Limits | None = None
    max_tokens: int | None = None


def _read_chat(data: bytes, known: Known) -> ModelRequest:
    body = decoded(_ChatBody, data)
    _need_messages(body.messages)
    refuse_choices(body)
    if body.response_format is not None:
        body.response_format.refuse("response_format")
    own = whole(body.max_completion_tokens, "max_completion_tokens")
    return _request(
        "chat", body, known.messages(body.messages, _chat_message, "messages"), size=len(data),
        max_tokens=own if own is not None else whole(body.max_tokens, "max_tokens"), stop=stops(body.stop, "stop"),
        usage=body.stream_options is not None and bool(body.stream_options.include_usage), logprobs=bool(body.logprobs),
        return_ids=bool(body.return_token_ids),
    )  # fmt: skip


def _chat_message(data: bytes, where: str) -> Message:
    return decoded(_ChatMessage, data, where).message(where)


def _read_generate(data: bytes, known: Known) -> ModelRequest:
    body = decoded(_GenerateBody, data)
    _need_messages(body.token_ids, "token_ids")
    given = body.sampling_params or body
    refuse_choices(given)
    limit = whole(given.max_tokens, "max_tokens")
    return _request("generate", body, (), size=len(data), token_ids=tuple(body.token_ids), max_tokens=limit)


def _usage(reply: Reply) -> dict[str, int]:
    prompt, made = reply.prompt_tokens, len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _head(request: ModelRequest, reply: Reply, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.name}", "object": kind, "created": int(time.time()), "model": request.model}


def _chat_calls(message: Message) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]


def _token_logprobs(reply: Reply) -> list[Json]:
    pairs = zip(reply.token_ids.tolist(), reply.logprobs.tolist(), strict=True)
    return [{"token": f"token_id:{i}", "logprob": logprob, "bytes": None, "top_logprobs": []} for i, logprob in pairs]


def _write_chat(request: ModelRequest, reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.message.text}
    if reply.message.calls:
        message |= {"content": reply.message.text or None, "tool_calls": _chat_calls(reply.message)}
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    choice: Json = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": _token_logprobs(reply)}
    if request.return_ids:
        choice["token_ids"] = reply.token_ids.tolist()
    return {**_head(request, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _write_generate(request: ModelRequest, reply: Reply) -> Json:
    choice = {
        "index": 0, "token_ids": reply.token_ids.tolist(), "finish_reason": "length" if reply.finish == "length" else "stop",
        "logprobs": {"content": _token_logprobs(reply)}, "weight_versions": reply.versions.tolist(),
    }  # fmt: skip
    return {"request_id": reply.name, "model": request.model, "choices": [choice], "usage": _usage(reply)}


def _stream_chat(request: ModelRequest, reply: Reply) -> Iterator[bytes]:
    head = _head(request, reply, "chat.completion.chunk")
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": reply.message.reasoning}] * bool(reply.message.reasoning)
    deltas += [{"content": reply.message.text}] * bool(reply.message.text)
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_chat_calls(reply.message))]
    for delta in deltas:
        yield sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish}]})
    if request.usage:
        yield sse({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


# ---------------------------------------------------------------- Anthropic's messages


class _Block(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Content = None


class _Turn(msgspec.Struct):
    role: str | None = None
    content: str | list[_Block] | None = None


class _MessagesBody(Sampling, kw_only=True):
    messages: list[_Turn] = []
    system: Content = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


def _read_messages(data: bytes, known: Known) -> ModelRequest:
    body = decoded(_MessagesBody, data)
    _need_messages(body.messages)
    messages = [Message("system", text_of(body.system, "system"))] if body.system else []
    for index, turn in enumerate(body.messages):
        messages += _messages_of(turn, f"messages[{index}]")
    choice = body.tool_choice.get("type") if isinstance(body.tool_choice, Mapping) else None
    body.tool_choice = choice if choice in ("auto", "any", "none") else None
    limit, stop = whole(body.max_tokens, "max_tokens"), stops(body.stop_sequences, "stop_sequences")
    return _request("messages", body, tuple(messages), size=len(data), max_tokens=limit, stop=stop)


def _messages_of(given: _Turn, where: str) -> list[Message]:
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


def _write_messages(request: ModelRequest, reply: Reply) -> Json:
    content: list[Json] = []
    if reply.message.reasoning:
        content.append({"type": "thinking", "thinking": reply.message.reasoning, "signature": ""})
    if reply.message.text or not reply.message.calls:
        content.append({"type": "text", "text": reply.message.text})
    for call in reply.message.calls:
        given = json.loads(call.arguments, parse_constant=str)  # the model may write NaN, for which JSON has no form
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    finish = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
    return {
        "id": f"msg_{reply.name}", "type": "message", "role": "assistant", "model": request.model, "content": content,
        "stop_reason": "stop_sequence" if reply.stop else finish, "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.token_ids)},
    }  # fmt: skip


def _stream_messages(request: ModelRequest, reply: Reply) -> Iterator[bytes]:
    answer = _write_messages(request, reply)
    usage = {**answer["usage"], "output_tokens": 0}
    opening = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[Json] = [{"type": "message_start", "message": opening}]
    for index, block in enumerate(answer["content"]):
        name = block["type"]
        if name == "tool_use":
            first, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        else:
            first, delta = {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}
        events += [
            {"type": "content_block_start", "index": index, "content_block": first},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events += [{"type": "message_delta", "delta": end, "usage": answer["usage"]}, {"type": "message_stop"}]
    for event in events:
        yield sse(event, event["type"])


# ---------------------------------------------------------------- OpenAI's responses


class _Item(_ChatMessage, kw_only=True):
    type: str | None = None
    summary: list[str | Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: Content = None


class _Text(msgspec.Struct):
    format: _StrictFormat | None = None


class _ResponsesBody(Sampling, kw_only=True):
    input: str | list[_Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    previous_response_id: Any = None
    conversation: Any = None


def _read_responses(data: bytes, known: Known) -> ModelRequest:
    body = decoded(_ResponsesBody, data)
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name):
            raise RequestRefused(f"{name}: answers are not kept here; send the whole input", name)
    if body.text is not None and body.text.format is not None:
        body.text.format.refuse("text.format")
    messages = [Message("system", body.instructions)] if body.instructions else []
    given = [_Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    _need_messages(given, "input")
    for index, item in enumerate(given or ()):
        _add(messages, item, f"input[{index}]")
    limit = whole(body.max_output_tokens, "max_output_tokens")
    return _request("responses", body, tuple(messages), size=len(data), max_tokens=limit)


def _add(messages: list[Message], item: _Item, where: str) -> None:
    """Add one item; reasoning, text and calls of an assistant's turn become one message."""
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


def _write_responses(request: ModelRequest, reply: Reply) -> Json:
    output: list[Json] = []
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


def _stream_responses(request: ModelRequest, reply: Reply) -> Iterator[bytes]:
    answer = _write_responses(request, reply)
    opening = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": "created", "response": opening}]
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        first = {**item, **empty, "status": "in_progress"}
        events.append({"type": "output_item.added", "output_index": index, "item": first})
        if item["type"] == "message":
            part, at = item["content"][0], {**place, "content_index": 0}
            events += [
                {"type": "content_part.added", **at, "part": {**part, "text": ""}},
                {"type": "output_text.delta", **at, "delta": part["text"], "logprobs": []},
                {"type": "output_text.done", **at, "text": part["text"], "logprobs": []},
                {"type": "content_part.done", **at, "part": part},
            ]
        elif item["type"] == "function_call":
            said = item["arguments"]
            events += [
                {"type": "function_call_arguments.delta", **place, "delta": said},
                {"type": "function_call_arguments.done", **place, "arguments": said, "name": item["name"]},
            ]
        events.append({"type": "output_item.done", "output_index": index, "item": item})
    events.append({"type": answer["status"], "response": answer})
    for number, event in enumerate(events):
        kind = f"response.{event['type']}"
        yield sse({**event, "type": kind, "sequence_number": number}, kind)


_GENERATE = Dialect(_read_generate, _write_generate, None)
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Dialect(_read_chat, _write_chat, _stream_chat),
    "/v1/responses": Dialect(_read_responses, _write_responses, _stream_responses),
    "/v1/messages": Dialect(
        _read_messages, _write_messages, _stream_messages, b'event: ping\ndata: {"type": "ping"}\n\n'
    ),
    "/inference/v1/generate": _GENERATE,
    "/v1/inference/v1/generate": _GENERATE,
}
"""Dialects by the request's path."""
