"""An agent of pydantic-ai: whole answers, or streamed ones."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="Be brief.")


@agent.tool_plain
def calc(expression: str) -> str:
    """Compute."""
    return "42" if expression == "6*7" else "?"


async def streamed():
    async with agent.run_stream("6*7?") as run:
        return await run.get_output()


if __name__ == "__main__":
    print(json.dumps(agent.run_sync("6*7?").output if sys.argv[1] == "plain" else asyncio.run(streamed())))  # noqa: T201 - its result
