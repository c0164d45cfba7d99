"""An agent of strands, which streams."""

import json
import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def calc(expression: str) -> str:
    """Compute."""
    return "42" if expression == "6*7" else "?"


if __name__ == "__main__":
    place = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    agent = Agent(model=OpenAIModel(client_args=place, model_id="policy"), tools=[calc], callback_handler=None)
    print(json.dumps(str(agent("6*7?")).strip()))  # noqa: T201 - its result
