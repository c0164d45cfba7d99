"""OpenAI's chat completions, requests with token ids, and the parts that all dialects share.

A request that a training run cannot answer is refused with the field's name: several choices,
strict output formats, tools that must be called. The run's sampling parameters replace a client's,
which is logged once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from libra.agents.messages import ROLES, Call, Message, ModelRequest, Reply, canonical_arguments
from libra.agents.request_bodies import (
    RUNS_OWN,
    Content,
    Known,
    Sampling,
    decoded,
    offered,
    refuse_choices,
    stops,
    text_of,
    whole,
)
from libra.errors import RequestRefused

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class ChatMessage(msgspec.Struct):
    """A message of OpenAI's chat completions."""

    role: str = ""
    content: Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    def message(self, where: str) -> Message:
        """The message in the form of all dialects; RequestRefused names the wrong field."""
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


class StrictFormat(msgspec.Struct):
    """A format of the answer."""

    strict: bool | None = None
    json_schema: StrictFormat | None = None

    def refuse_strict(self, where: str) -> None:
        """RequestRefused for an enforced format, which would change the trained distribution."""
        if self.strict or (self.json_schema is not None and self.json_schema.strict):
            told = f"{where}: a strict schema would change the model's samples; send strict: false, or check the answer"
            raise RequestRefused(f"{told} in the agent", where)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ChatBody(Sampling, kw_only=True):
    messages: list[msgspec.Raw] = []
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: _StreamOptions | None = None
    response_format: StrictFormat | None = None
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


def read_chat(data: bytes, known: Known) -> ModelRequest:
    """A request of ``/chat/completions``; RequestRefused if a run cannot answer it."""
    body = decoded(_ChatBody, data)
    if not body.messages:
        raise RequestRefused("messages: a list with at least one message is needed", "messages")
    refuse_choices(body)
    if body.response_format is not None:
        body.response_format.refuse_strict("response_format")
    own = whole(body.max_completion_tokens, "max_completion_tokens")
    return request_of(
        "chat", body, known.messages(body.messages, _chat_message, "messages"), size=len(data),
        max_tokens=own if own is not None else whole(body.max_tokens, "max_tokens"), stop=stops(body.stop, "stop"),
        usage=body.stream_options is not None and bool(body.stream_options.include_usage), logprobs=bool(body.logprobs),
        return_ids=bool(body.return_token_ids),
    )  # fmt: skip


def _chat_message(data: bytes, where: str) -> Message:
    return decoded(ChatMessage, data, where).message(where)


def read_generate(data: bytes, known: Known) -> ModelRequest:
    """A request of ``/inference/v1/generate`` with token ids; RequestRefused if a run cannot answer
    it."""
    body = decoded(_GenerateBody, data)
    if not body.token_ids:
        raise RequestRefused("token_ids: a list of at least one token id is needed", "token_ids")
    given = body.sampling_params or body
    refuse_choices(given)
    limit = whole(given.max_tokens, "max_tokens")
    return request_of("generate", body, (), size=len(data), token_ids=tuple(body.token_ids), max_tokens=limit)


def request_of(dialect: str, body: Sampling, messages: tuple[Message, ...], **more: Any) -> ModelRequest:
    """A request with the fields of all dialects."""
    found = offered(body)
    return ModelRequest(
        dialect, messages, tools=found.tools, template_args=found.args, tools_text=found.text, stream=bool(body.stream),
        model=body.model or "policy", ignored=tuple([name for name in RUNS_OWN if getattr(body, name) is not None]), **more,
    )  # fmt: skip


def usage_of(reply: Reply) -> dict[str, int]:
    """Numbers of tokens."""
    prompt, made = reply.prompt_tokens, len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def chat_calls(message: Message) -> list[dict[str, Any]]:
    """The calls of a message in OpenAI's form."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]


def _head(request: ModelRequest, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.name}", "object": kind, "created": int(time.time()), "model": request.model}


def write_chat(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """The answer to a chat request that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.text}
    if reply.message.calls:
        message |= {"content": reply.message.text or None, "tool_calls": chat_calls(reply.message)}
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": token_logprobs(reply)}
    if request.return_ids:
        choice["token_ids"] = reply.token_ids.tolist()
    return {**_head(request, reply, "chat.completion"), "choices": [choice], "usage": usage_of(reply)}


def write_generate(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """The answer to a request with token ids."""
    finish = "length" if reply.finish == "length" else "stop"
    choice = {
        "index": 0, "token_ids": reply.token_ids.tolist(), "finish_reason": finish,
        "logprobs": {"content": token_logprobs(reply)}, "weight_versions": reply.versions.tolist(),
    }  # fmt: skip
    return {"request_id": reply.name, "model": request.model, "choices": [choice], "usage": usage_of(reply)}


def token_logprobs(reply: Reply) -> list[dict[str, Any]]:
    """Each token by its id, with its behaviour log-probability."""
    pairs = zip(reply.token_ids.tolist(), reply.logprobs.tolist(), strict=True)
    return [{"token": f"token_id:{i}", "logprob": logprob, "bytes": None, "top_logprobs": []} for i, logprob in pairs]


def stream_chat(request: ModelRequest, reply: Reply) -> Iterator[str]:
    """The events of a streamed answer."""
    head = _head(request, reply, "chat.completion.chunk")

    def event(delta: dict[str, Any], finish: str | None = None) -> str:
        return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield event({"role": "assistant", "content": ""})
    if reply.message.reasoning:
        yield event({"reasoning_content": reply.message.reasoning})
    if reply.message.text:
        yield event({"content": reply.message.text})
    for index, call in enumerate(chat_calls(reply.message)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, reply.finish)
    if request.usage:
        yield sse({**head, "choices": [], "usage": usage_of(reply)})
    yield "data: [DONE]\n\n"


def sse(data: Mapping[str, Any], event: str = "") -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data)}\n\n"
