"""The quick start's task as an agent of openai-agents, in a virtual environment of its own: nothing here imports Libra.

Its calculator says the words of the built-in loop's, so that the model that ships knows them.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

set_tracing_disabled(True)
HTTP = DefaultAsyncHttpxClient()
"""Agents that are `async` share a process, and so its connections."""
LIMIT = 999
_LINE = re.compile(r"\s*[A-Za-z_]\w{0,20}\s*->\s*([A-Za-z_]\w{0,20})\s*:\s*([-+*])\s*(-?\d{1,9})\s*")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def wrong(_: Any, error: Exception) -> str:
    """What the model reads of a call that failed."""
    return f"{type(error).__name__}: {error}"


@function_tool(failure_error_function=wrong)
def calculator(line: str, value: int) -> str:
    """Works out one line.

    Args:
        line: The line, as it is in the question, e.g. "k -> d: + 5".
        value: The value of the name that the line begins with, e.g. 17.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError('one line per call, such as "k -> d: + 5"')
    name, sign, operand = match.groups()
    result = _OPERATORS[sign](value, int(operand))
    if max(abs(result), abs(value)) > LIMIT:
        raise OverflowError(f"above {LIMIT}")
    return f"{name} = {result}"


async def agent(messages: list[dict[str, Any]], base_url: str, api_key: str) -> str | None:
    """Answer one question; None where the model came to no end."""
    system, user = (message["content"] for message in messages)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    model = OpenAIChatCompletionsModel("policy", client)
    solver = Agent(name="solver", instructions=system, tools=[calculator], model=model)
    try:
        return str((await Runner.run(solver, user, max_turns=24)).final_output)
    except (BadRequestError, MaxTurnsExceeded, ModelBehaviorError):
        return None
