from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading

import pytest

from libra.envs import FunctionEnvironment, hung_threads, run_action, tool
from libra.envs.actions import run_bounded
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


def table(rows: list[int]) -> dict:
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


async def leave_async() -> str:
    """Tries to end the process."""
    sys.exit(3)


def hang() -> str:
    """Waits for the gate."""
    gate.wait()
    return "late"


async def hang_async() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return "never"


async def refuses_to_stop() -> str:
    """Swallows the cancellation once."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()
    return "never"


def unspeakable() -> object:
    """Returns what cannot be written down."""

    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("mute")

    return Mute()


@pytest.fixture
def act():
    tools = [echo, table, broken, leave, leave_async, unspeakable]
    short = [tool(function, timeout_s=0.01) for function in (hang, hang_async, refuses_to_stop)]
    environment = FunctionEnvironment(prompts=["hi"], reward=lambda completion: 0.0, tools=[*tools, *short])

    def run(name: str, error: str | None = None, **arguments: object):
        call = ToolCall(name, arguments, error)
        return asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="train-0-0-0/1/0"))

    return run


def test_a_call_gives_its_return_and_the_action_id_to_tools_that_ask_for_it(act):
    given = act("echo", text="ab", times=2)
    assert (given.tool, given.status, given.content) == ("echo", ToolStatus.OK, "ababtrain-0-0-0/1/0")
    assert given.payload_chars == len(given.content)
    assert given.latency_s > 0


def test_what_is_not_text_is_shown_as_json(act):
    assert act("table", rows=[1, 2]).content == '{"rows": [1, 2]}'


@pytest.mark.parametrize(
    ("name", "content"),
    [("broken", "KeyError: 'no such shelf'"), ("leave", "SystemExit: 3"), ("leave_async", "SystemExit: 3")],
)
def test_a_tool_that_raises_is_an_error_the_model_can_read(act, name, content):
    given = act(name)
    assert (given.status, given.content) == (ToolStatus.ERROR, content)


def test_a_return_that_cannot_be_written_down_is_an_error(act):
    given = act("unspeakable")
    assert given.status is ToolStatus.ERROR
    assert "RuntimeError" in given.content


def test_ten_megabytes_are_cut_and_the_model_is_told(act):
    given = act("echo", text="x" * 1000, times=10_000)
    assert given.status is ToolStatus.TRUNCATED
    assert given.payload_chars == 10_000_015
    assert given.content == "x" * 8000 + "\n[9992015 of 10000015 characters dropped]"


@pytest.mark.parametrize("name", ["hang_async", "refuses_to_stop"])
def test_an_async_tool_that_hangs_is_cut_off(act, name):
    given = act(name)
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
    assert not [thread for thread in threading.enumerate() if thread.name == "tool hang"]


def test_threads_are_used_again_one_call_at_a_time():
    async def calls():
        together = threading.Barrier(3)

        def meet():
            together.wait()
            return threading.get_ident()

        async def one():
            return (await run_bounded(meet, {}, 10.0, is_async=False, name="meet"))[0]

        return [set(await asyncio.gather(one(), one(), one())) for _ in range(3)]

    rounds = asyncio.run(calls())
    assert all(len(threads) == 3 for threads in rounds)  # none waited for another, or the barrier would not have opened
    assert len(set.union(*rounds)) < 9


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"name": "", "error": "not valid JSON"}, "not valid JSON"),
        ({"name": "ech"}, "no tool 'ech'"),
        ({"name": "echo"}, "argument 'text' is missing"),
        ({"name": "echo", "text": "x", "tims": 2}, "no argument 'tims'"),
        ({"name": "echo", "text": 3}, "'text' must be string, got int"),
        ({"name": "echo", "text": "x", "times": "2"}, "'times' must be integer, got str"),
        ({"name": "echo", "text": "x", "times": True}, "'times' must be integer, got bool"),
        ({"name": "echo", "text": "x", "action_id": "forged"}, "no argument 'action_id'"),
        ({"name": "table", "rows": "1, 2"}, "'rows' must be array, got str"),
    ],
)
def test_a_wrong_call_is_told_what_is_right(act, call, says):
    given = act(**call)
    assert given.status is ToolStatus.MALFORMED
    assert says in given.content
    expected = call["name"] if call["name"] in ("echo", "table") else "echo"
    assert f'expected {{"name": "{expected}", "arguments": {{' in given.content


def test_cancelling_the_action_is_not_swallowed():
    environment = FunctionEnvironment(prompts=["hi"], reward=lambda completion: 0.0, tools=[hang_async])

    async def run() -> None:
        action = asyncio.create_task(
            run_action(environment, environment.prompt("train", 0), ToolCall("hang_async", {}), action_id="a")
        )
        await asyncio.sleep(0)
        action.cancel()
        with pytest.raises(asyncio.CancelledError):
            await action

    asyncio.run(run())


def test_what_a_tool_calls_fatal_is_no_observation():
    def says_so() -> str:
        """Raises what is not for the model."""
        raise ToolFault("the sandbox is gone")

    tools = [
        tool(says_so),
        tool(broken, fatal=("error",)),
        tool(hang_async, timeout_s=0.01, fatal=("timeout",)),
        tool(hang_async, name="hang", timeout_s=0.01, fatal=("error",)),
    ]
    environment = FunctionEnvironment(prompts=["hi"], reward=lambda completion: 0.0, tools=tools)

    def run(name: str):
        call = ToolCall(name, {})
        return asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="train-0-0-0/1/0"))

    for name, error, words in (
        ("says_so", ToolFault, "the sandbox is gone"),
        ("broken", ToolFault, "no such shelf"),
        ("hang_async", ToolTimeout, "timed out after 0.01 s"),
    ):
        with pytest.raises(error, match=f"tool {name}: .*{words}.*train-0-0-0/1/0"):
            run(name)
    assert run("hang").status is ToolStatus.TIMEOUT
    with pytest.raises(ConfigError, match="allowed are 'error', 'timeout'"):
        tool(echo, fatal=("truncated",))
