"""OpenAI's chat completions, the token-in/token-out requests beside them, and the reading that all dialects share.

What a training run cannot do is refused with the field's name, never dropped: several choices, strict output formats, tools that
must be called. Sampling parameters are the run's own; a client's are ignored, which is logged once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra.agents.messages import Message, chat_message, tool_schema
from libra.agents.requests import ModelRequest, Reply
from libra.errors import RequestRefused

Body = Mapping[str, Any]

_RUNS_OWN = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")

_NO_VARIABLES = frozenset({
    "chat_template", "conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""What the rendering of a conversation takes beside the template's own variables: a template of the client's could say anything in
the model's name, or never end."""


def read_chat(body: Body) -> ModelRequest:
    """A request of ``/chat/completions``; RequestRefused if it cannot be answered as it is."""
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestRefused("messages: a list with at least one message is needed", "messages")
    refuse_choices(body)
    refuse_strict_format(body.get("response_format"), "response_format")
    options = body.get("stream_options")
    return ModelRequest(
        "chat",
        tuple(chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)),
        tools=read_tools(body),
        max_tokens=whole(body, "max_completion_tokens", whole(body, "max_tokens", None)),
        stop=stops(body.get("stop"), "stop"),
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        return_ids=bool(body.get("return_token_ids")),
        **common(body),
    )


def read_generate(body: Body) -> ModelRequest:
    """A request of ``/inference/v1/generate``: token ids in, token ids out."""
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise RequestRefused("token_ids: a list of at least one token id is needed", "token_ids")
    params = body.get("sampling_params")
    given = params if isinstance(params, Mapping) else body
    refuse_choices(given)
    return ModelRequest(
        "generate", (), token_ids=tuple(ids), max_tokens=whole(given, "max_tokens", None), **common(body)
    )


def common(body: Body) -> dict[str, Any]:
    """What all dialects read alike."""
    args = body.get("chat_template_kwargs") or {}
    if not isinstance(args, Mapping):
        raise RequestRefused("chat_template_kwargs: an object is needed", "chat_template_kwargs")
    for name in _NO_VARIABLES & args.keys():
        raise RequestRefused(
            f"chat_template_kwargs: {name!r} is no variable of the template; the run decides it", "chat_template_kwargs"
        )
    ignored = tuple(name for name in _RUNS_OWN if body.get(name) is not None)
    return {"model": str(body.get("model") or "policy"), "template_args": dict(args), "ignored": ignored}


def read_tools(body: Body) -> tuple[Mapping[str, Any], ...]:
    """The tools of a request; none where it chooses none."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none", "required", "any") and not isinstance(choice, Mapping):
        raise RequestRefused(f"tool_choice: got {choice!r}; auto and none are answered", "tool_choice")
    tools = body.get("tools") or ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestRefused("tools: a list is needed", "tools")
    # "required", or one tool, would change the distribution that is trained: the model may still answer without a call.
    return () if choice == "none" else tuple(tool_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def refuse_choices(body: Body) -> None:
    """RequestRefused for more than one choice: each is a trajectory of its own (trainer.group_size)."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise RequestRefused(f"{name}: got {body[name]!r}; a request has one answer, ask again for another", name)


def refuse_strict_format(given: Any, where: str) -> None:
    """RequestRefused for a format that is to be enforced, which would change the distribution that is trained."""
    if given is None or given == {}:
        return
    if not isinstance(given, Mapping):
        raise RequestRefused(f"{where}: an object is needed", where)
    schema = given.get("json_schema")
    if bool(given.get("strict")) or (isinstance(schema, Mapping) and bool(schema.get("strict"))):
        raise RequestRefused(
            f"{where}: a strict schema would change what the model samples, and is not supported; send strict: false, or check "
            "the answer in the agent",
            where,
        )


def whole(body: Body, name: str, default: int | None) -> int | None:
    """A whole number above 0, or ``default`` where there is none."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise RequestRefused(f"{name}: got {value!r}; a whole number above 0 is needed", name)
    return value


def stops(given: Any, where: str) -> tuple[str, ...]:
    """Stop texts: none, one, or a list."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > 16 or not all(isinstance(each, str) and each for each in found):
        raise RequestRefused(f"{where}: one text, or a list of at most 16, is needed", where)
    return found


def usage_of(reply: Reply) -> dict[str, int]:
    """The counts of tokens."""
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
    """The events of a streamed answer: the same message, whose parts come one after the other."""
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
