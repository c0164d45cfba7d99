"""An agent of smolagents, which rewrites what the model said before it sends it back."""

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calc(expression: str) -> str:
    """Compute.

    Args:
        expression: What to compute.
    """
    return "42" if expression == "6*7" else "?"


if __name__ == "__main__":
    place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    agent = ToolCallingAgent(tools=[calc], model=OpenAIServerModel("policy", **place), max_steps=4, verbosity_level=0)
    print(json.dumps(str(agent.run("6*7?"))))  # noqa: T201 - its result
