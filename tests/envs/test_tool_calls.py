import asyncio
import functools
import logging
import os
import sys
import threading

import pytest

from libra.envs import TOOL_FORMATS, FunctionEnvironment, hung_threads, run_action, tool
from libra.errors import ConfigError, ToolFault, ToolTimeout
from libra.types import ToolCall, ToolStatus

gate = threading.Event()


def echo(text: str, times: int = 1, action_id: str = "") -> str:
    """Says it again.

    Args:
        text: What.
        times: How often.
    """
    return text * times + action_id


def rows_of(rows: list[int]) -> dict:
    """A table.

    Args:
        rows: Its rows.
    """
    return {"rows": rows}


def broken() -> str:
    """Always fails."""
    raise KeyError("no such shelf")


def leave() -> str:
    """Tries to end the process."""
    sys.exit(3)


@functools.wraps(echo)
def wrapped(**given):
    async def later():
        return echo(**given)

    return later()


def hang() -> str:
    """Waits for the gate."""
    gate.wait()
    return "late"


async def hang_async() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return "never"


def unspeakable() -> object:
    """Returns what cannot be written down."""

    class Mute:
        def __str__(self):
            raise RuntimeError("mute")

    return Mute()


@pytest.fixture
def act():
    tools = [echo, tool(wrapped, name="wrapped"), rows_of, broken, leave, unspeakable]
    short = [tool(function, timeout_s=0.01) for function in (hang, hang_async)]
    environment = FunctionEnvironment(prompts=["hi"], reward=lambda completion: 0.0, tools=[*tools, *short])

    def run(name, error=None, **arguments):
        call = ToolCall(name, arguments, error)
        return asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="train-0-0-0/1/0"))

    return run


def test_a_call_gives_its_return_and_the_action_id_to_tools_that_ask_for_it(act):
    given = act("echo", text="ab", times=2)
    assert (given.tool, given.status, given.content) == ("echo", ToolStatus.OK, "ababtrain-0-0-0/1/0")
    assert given.payload_chars == len(given.content)
    assert given.latency_s > 0
    assert act("wrapped", text="ab").content == "abtrain-0-0-0/1/0", "an awaitable is awaited"
    assert act("rows_of", rows=[1, 2]).content == '{"rows": [1, 2]}', "what is not text is shown as JSON"


@pytest.mark.parametrize(
    ("name", "content"), [("broken", "KeyError"), ("leave", "SystemExit: 3"), ("unspeakable", "RuntimeError")]
)
def test_a_tool_that_raises_is_an_error_the_model_can_read(act, name, content):
    given = act(name)
    assert given.status is ToolStatus.ERROR and content in given.content


def test_ten_megabytes_are_cut_and_the_model_is_told(act):
    given = act("echo", text="x" * 1000, times=10_000)
    assert given.status is ToolStatus.TRUNCATED
    assert given.payload_chars == 10_000_015
    assert given.content == "x" * 8000 + "\n[9992015 of 10000015 characters dropped]"


def test_an_async_tool_that_hangs_is_cut_off(act):
    given = act("hang_async")
    assert (given.status, given.content) == (ToolStatus.TIMEOUT, "timed out after 0.01 s")


def test_a_hung_thread_is_cut_off_counted_and_named_in_the_log(act, caplog):
    before = hung_threads()
    gate.clear()
    with caplog.at_level(logging.WARNING):
        given = act("hang")
    assert given.status is ToolStatus.TIMEOUT
    assert hung_threads() == before + 1
    assert "tool hang" in caplog.text
    gate.set()
    while hung_threads() != before:  # it ends its call, and is used again
        os.sched_yield()


@pytest.mark.parametrize(("call", "says"), [
    ({"name": "", "error": "not valid JSON"}, "not valid JSON"),
    ({"name": "ech"}, "no tool 'ech'"),
    ({"name": "echo"}, "argument 'text' is missing"),
    ({"name": "echo", "text": "x", "tims": 2}, "no argument 'tims'"),
    ({"name": "echo", "text": "x", "times": True}, "'times' must be integer"),
    ({"name": "echo", "text": "x", "action_id": "forged"}, "no argument 'action_id'"),
    ({"name": "rows_of", "rows": "1, 2"}, "'rows' must be array"),
])  # fmt: skip
def test_a_wrong_call_is_told_what_is_right(act, call, says):
    given = act(**call)
    assert given.status is ToolStatus.MALFORMED
    assert says in given.content
    assert '"arguments": {' in given.content, "how it is called"


def test_what_a_tool_calls_fatal_is_no_observation():
    def says_so() -> str:
        """Raises what is not for the model."""
        raise ToolFault("the sandbox is gone")

    tools = [
        tool(says_so), tool(broken, fatal=("error",)), tool(hang_async, timeout_s=0.01, fatal=("timeout",)),
        tool(hang_async, name="hang", timeout_s=0.01, fatal=("error",)),
    ]  # fmt: skip
    environment = FunctionEnvironment(prompts=["hi"], reward=lambda completion: 0.0, tools=tools)

    def run(name):
        call = ToolCall(name, {})
        return asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="train-0-0-0/1/0"))

    for name, error in (("says_so", ToolFault), ("broken", ToolFault), ("hang_async", ToolTimeout)):
        with pytest.raises(error, match="train-0-0-0/1/0"):
            run(name)
    assert run("hang").status is ToolStatus.TIMEOUT
    with pytest.raises(ConfigError):
        tool(echo, fatal=("truncated",))


WRITTEN = {
    "hermes": '<tool_call>{"name": "echo", "arguments": {"text": "a", "times": %s}}</tool_call>',
    "qwen3_coder": "<tool_call><function=echo><parameter=text>a</parameter><parameter=times>%s</parameter></function></tool_call>",
}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_are_read_in_the_chosen_format_and_mistakes_answered_in_it(tool_format):
    environment = FunctionEnvironment(prompts=["q"], reward=lambda completion: 0.0, tools=[echo])
    environment.tool_format = tool_format
    prompt = environment.prompt("train", 0)
    (call,) = environment.parse(WRITTEN[tool_format] % "3")
    assert asyncio.run(run_action(environment, prompt, call, action_id="!")).content == "aaa!"
    (wrong,) = environment.parse(WRITTEN[tool_format] % '"x"')
    answer = asyncio.run(run_action(environment, prompt, wrong, action_id="b"))
    assert answer.status is ToolStatus.MALFORMED
    usage = {"hermes": '{"name": "echo"', "qwen3_coder": "<function=echo><parameter=text>"}
    assert usage[tool_format] in answer.content
