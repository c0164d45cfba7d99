"""Agents of `benchmarks.live.gateway`: the quick start's task by the openai client and by the standard
library, and turns of a fixed length by the former. Agents of the latter are forks of a process with
this module, so it imports little."""

from __future__ import annotations

import http.client
import json
import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from libra.envs.tool_arithmetic import calculate

try:
    from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
except ImportError:  # the standard library's agents do without
    HTTP: Any = None
else:
    HTTP = DefaultAsyncHttpxClient()

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out one line.",
        "parameters": {
            "type": "object",
            "properties": {
                "line": {"type": "string", "description": 'The line, as it is in the question, e.g. "k -> d: + 5".'},
                "value": {
                    "type": "integer",
                    "description": "The value of the name that the line begins with, e.g. 17.",
                },
            },
            "required": ["line", "value"],
        },
    },
}
OBSERVATION = "w8"
"""After each turn: one token, like the answer of the built-in loop's tool."""


def returned(arguments: str) -> str:
    try:
        return calculate(**json.loads(arguments))
    except (TypeError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


async def openai_client(messages: list[dict[str, Any]]) -> str | None:
    """Answer one question with the openai client, as `workflows/openai_agent.py` does."""
    client, said = AsyncOpenAI(http_client=HTTP), list[Any](messages)
    while True:
        try:
            answered = await client.chat.completions.create(model="policy", messages=said, tools=[CALCULATOR])
        except BadRequestError:
            return None
        message = answered.choices[0].message
        if not message.tool_calls:
            return message.content
        said.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            said.append({"role": "tool", "tool_call_id": call.id, "content": returned(call.function.arguments)})  # type: ignore[union-attr]


class Connection:
    """One kept connection to the gateway, without a client library."""

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self._path, self._http = url.path, http.client.HTTPConnection(str(url.hostname), url.port, timeout=600)

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any] | None:
        body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True, **more})
        self._http.request("POST", f"{self._path}/chat/completions", body, {"content-type": "application/json"})
        answer = self._http.getresponse()
        told = json.load(answer)
        return told["choices"][0] if answer.status == 200 else None


def plain(messages: list[dict[str, Any]], base_url: str, seen: str) -> None:
    connection, said, ids = Connection(base_url), list(messages), []
    while (choice := connection.ask(said, tools=[CALCULATOR])) is not None:
        ids.append(choice["token_ids"])
        calls = choice["message"].get("tool_calls")
        if not calls:
            break
        said.append(choice["message"])
        for call in calls:
            said.append(
                {"role": "tool", "tool_call_id": call["id"], "content": returned(call["function"]["arguments"])}
            )
    if seen:
        Path(seen, f"{os.getpid()}-{uuid.uuid4().hex}.json").write_text(json.dumps(ids))


async def fixed_openai(messages: list[dict[str, Any]], turns: int) -> None:
    client, said = AsyncOpenAI(http_client=HTTP), list[Any](messages)
    for _ in range(turns):
        message = (await client.chat.completions.create(model="policy", messages=said)).choices[0].message
        said += [message.model_dump(exclude_none=True), {"role": "user", "content": OBSERVATION}]
