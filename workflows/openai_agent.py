"""Train an agent that was written with the plain ``openai`` client: it learns the quick start's task through its gateway.

The agent knows nothing of Libra: the client finds the model by OPENAI_BASE_URL and OPENAI_API_KEY. Run it with::

    python workflows/openai_agent.py run.seed=1

Arguments are settings, as for ``libra run``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import BadRequestError, OpenAI

from libra.envs.tool_arithmetic import ToolArithmetic  # only for its calculator


def agent(messages: list[dict[str, str]]) -> str | None:
    """Answer one question with the calculator, a call at a time."""
    (calculator,) = ToolArithmetic(timeout_rate=0).tools
    client, said = OpenAI(), list[Any](messages)
    while True:
        try:
            answer = client.chat.completions.create(model="policy", messages=said, tools=[calculator.schema])  # type: ignore[list-item]
        except BadRequestError:  # the conversation is as long as it may be
            return None
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        said.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                returned = compute(calculator, json.loads(call.function.arguments))  # type: ignore[union-attr]
            except Exception as error:  # noqa: BLE001 - the model reads what was wrong with its call
                returned = f"{type(error).__name__}: {error}"
            said.append({"role": "tool", "tool_call_id": call.id, "content": returned})


def compute(calculator: Any, arguments: dict[str, Any]) -> str:
    """What the calculator returns."""
    import asyncio

    value = calculator.function(**arguments, **({"action_id": "agent"} if calculator.takes_action_id else {}))
    return str(asyncio.run(value) if calculator.is_async else value)


def main() -> None:
    """Train, and print what was learned."""
    from libra.config import load_config
    from libra.driver.session import run

    config = load_config("configs/quickstart.yaml", overrides=[*sys.argv[1:], "agent.function=openai_agent:agent"])
    print(run(config))


if __name__ == "__main__":
    main()
