"""Train an agent that was written with the plain ``openai`` client: it learns the quick start's task through its gateway.

The agent knows nothing of Libra: the client finds the model by OPENAI_BASE_URL and OPENAI_API_KEY. Run it with::

    python workflows/openai_agent.py [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

import libra
from libra.config import typed_settings
from libra.envs.tool_arithmetic import calculate  # only what its tool computes
from libra.errors import LibraError

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
HTTP = DefaultAsyncHttpxClient()
"""Agents that are `async` share a process, and so its connections."""


async def agent(messages: list[dict[str, str]]) -> str | None:
    """Answer one question with the calculator, a call at a time."""
    client, said = AsyncOpenAI(http_client=HTTP), list[Any](messages)
    while True:
        try:
            answer = await client.chat.completions.create(model="policy", messages=said, tools=[CALCULATOR])
        except BadRequestError:  # the conversation is as long as it may be
            return None
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        said.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            said.append({"role": "tool", "tool_call_id": call.id, "content": returned(call.function.arguments)})  # type: ignore[union-attr]


def returned(arguments: str) -> str:
    """What the calculator says, or what was wrong with the call: the model reads it."""
    try:
        return calculate(**json.loads(arguments))
    except (TypeError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> int:
    """Train, and print what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="section.key=value")
    overrides = parser.parse_intermixed_args(arguments).override
    try:
        print(libra.train(config="libra/quickstart", agent=agent, **typed_settings(overrides)))
    except LibraError as error:
        print(f"openai_agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
