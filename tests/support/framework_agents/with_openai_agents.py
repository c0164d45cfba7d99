"""An agent of openai-agents: chat completions, streamed ones, or responses."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def calc(expression: str) -> str:
    """Compute."""
    return "42" if expression == "6*7" else "?"


async def main(mode):
    kind = OpenAIResponsesModel if mode == "responses" else OpenAIChatCompletionsModel
    agent = Agent(name="solver", instructions="Be brief.", tools=[calc], model=kind("policy", AsyncOpenAI()))
    if mode != "streamed":
        return (await Runner.run(agent, "6*7?")).final_output
    run = Runner.run_streamed(agent, "6*7?")
    async for _ in run.stream_events():
        pass
    return run.final_output


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))  # noqa: T201 - its result
