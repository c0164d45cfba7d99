from __future__ import annotations

import asyncio

import pytest

from libra.envs import TOOL_FORMATS, FunctionEnvironment, run_action
from libra.types import ToolStatus


def double(value: int) -> int:
    """Twice as much.

    Args:
        value: Of what.
    """
    return 2 * value


WRITTEN = {
    "hermes": '<tool_call>{"name": "double", "arguments": {"value": %s}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=double>\n<parameter=value>\n%s\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_are_read_in_the_chosen_format_and_mistakes_answered_in_it(tool_format):
    environment = FunctionEnvironment(prompts=["q"], reward=lambda completion: 0.0, tools=[double])
    environment.tool_format = tool_format
    prompt = environment.prompt("train", 0)
    (call,) = environment.parse(WRITTEN[tool_format] % "21")
    assert asyncio.run(run_action(environment, prompt, call, action_id="a")).content == "42"
    (wrong,) = environment.parse(WRITTEN[tool_format] % '"x"')
    answer = asyncio.run(run_action(environment, prompt, wrong, action_id="b"))
    assert answer.status is ToolStatus.MALFORMED
    usage = {
        "hermes": '{"name": "double"',
        "qwen3_coder": "<function=double><parameter=value>...</parameter></function>",
    }
    assert usage[tool_format] in answer.content
