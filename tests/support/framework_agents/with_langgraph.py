"""An agent of langgraph, over langchain's client: whole answers, or streamed ones."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def calc(expression: str) -> str:
    """Compute."""
    return "42" if expression == "6*7" else "?"


def main(mode):
    model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"], temperature=0.7, max_tokens=512)
    agent, asked = create_react_agent(model, [calc]), {"messages": [("user", "6*7?")]}
    if mode == "plain":
        return agent.invoke(asked)["messages"][-1].content
    parts = (part for part, _ in agent.stream(asked, stream_mode="messages"))
    return "".join(part.content for part in parts if part.type == "AIMessageChunk")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201 - its result
