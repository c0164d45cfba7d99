"""Tools of a real MCP server: shared by what a process has, restarted after a crash, ended with the last environment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("mcp", reason="pip install 'libra-rl[mcp]'")

import mcp

from libra.config import config_from_dict
from libra.envs import make_environment, mcp_keeper, mcp_tools, run_action
from libra.envs.mcp_tools import McpServer, with_mcp_tools
from libra.errors import ConfigError, ToolFault
from libra.types import ToolCall, ToolStatus
from libra.worker.run_spec import RunSpec

SERVER = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'mcp_calculator.py'}"
OFFERED = ["add", "fail", "pid", "variable", "freeze", "hold", "nonsense", "leave", "die"]


@pytest.fixture
def plain():
    return make_environment("tool_arithmetic", {}, 0)


def called(environment, name, **arguments):
    return run_action(environment, environment.prompt("train", 0), ToolCall(name, arguments), action_id="a")


def test_its_tools_are_beside_the_environments_own(plain):
    async def play():
        both = with_mcp_tools(plain, SERVER)
        try:
            assert [tool.name for tool in both.tools] == ["calculator", *OFFERED]
            assert [tool.name for tool in plain.tools] == ["calculator"]
            assert both.tool_schemas[1]["function"]["parameters"]["required"] == ["a", "b"]
            returns = await asyncio.gather(*(called(both, "add", a=number, b=1) for number in range(20)))
            assert [each.content for each in returns] == [str(number + 1) for number in range(20)]
            assert (await called(both, "add", a=1)).status is ToolStatus.MALFORMED
            assert (await called(both, "add", a=1, b="x")).status is ToolStatus.MALFORMED
            failed = await called(both, "fail")
            assert failed.status is ToolStatus.ERROR
            assert "Error executing tool fail" in failed.content
        finally:
            await both.close()

    asyncio.run(play())


def test_one_server_for_a_process_and_another_after_a_crash(plain):
    async def play():
        one, other = with_mcp_tools(plain, SERVER), with_mcp_tools(plain, SERVER)
        first = int((await called(one, "pid")).content)
        assert int((await called(other, "pid")).content) == first
        with pytest.raises(ToolFault, match="ended during a call"):
            await called(one, "die")
        second = int((await called(other, "pid")).content)
        assert second != first
        await one.close()
        assert int((await called(other, "pid")).content) == second, "another environment still uses it"
        await other.close()
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)

    asyncio.run(play())


def test_what_a_server_leaves_ends_with_it(plain):
    async def play():
        here = with_mcp_tools(plain, SERVER)
        left = [int((await called(here, "leave")).content)]
        assert psutil.pid_exists(left[0])
        with pytest.raises(ToolFault, match="ended during a call"):
            await called(here, "die")
        left.append(int((await called(here, "leave")).content))
        await here.close()
        assert not any(map(psutil.pid_exists, left))

    asyncio.run(play())


def test_what_a_server_leaves_ends_where_its_worker_is_killed():
    program = (
        "import asyncio, time\nfrom libra.envs.mcp_tools import McpServer\n"
        f"print(asyncio.run(McpServer({SERVER!r}).call('leave', {{}})), flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        left = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    assert psutil.wait_procs([left], 60)[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_program_leaves_ends_where_its_keeper_is_told_to_end(number):
    program = "import os, time\nif os.fork() == 0:\n    os.setsid(); print(os.getpid(), flush=True)\ntime.sleep(600)"
    words = [sys.executable, "-I", "-S", mcp_keeper.__file__, sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        left = psutil.Process(int(keeper.stdout.readline()))
        keeper.send_signal(number)
        assert keeper.wait(60) == 0
    assert psutil.wait_procs([left], 60)[1] == []


def test_a_call_while_an_idle_server_ends_has_another_one(monkeypatch):
    has_ended, go_on = threading.Event(), threading.Event()

    class Slow(mcp.Client):
        async def __aexit__(self, *given):
            await super().__aexit__(*given)
            has_ended.set()
            await asyncio.to_thread(go_on.wait, 60)

    monkeypatch.setattr(mcp, "Client", Slow)
    server = McpServer(SERVER)
    with monkeypatch.context() as sooner:
        sooner.setattr(mcp_tools, "IDLE_S", 0.01)
        assert [tool.name for tool in server.tools()] == OFFERED
        assert has_ended.wait(60)
    try:
        assert asyncio.run(server.call("add", {"a": 1, "b": 1})) == "2"
        assert server.starts == 2
    finally:
        go_on.set()
        server.close()


def test_a_run_names_it_in_its_configuration(tmp_path):
    config = config_from_dict({"environment": {"tools": {"mcp": SERVER}}})
    environment = RunSpec("run", 0, tmp_path, "", config).make_environment()
    assert [tool.name for tool in environment.tools] == ["calculator", *OFFERED]
    asyncio.run(environment.close())


def test_a_server_that_is_stopped_is_killed_and_replaced_and_others_go_on(plain, monkeypatch):
    async def play():
        one, other = with_mcp_tools(plain, SERVER), with_mcp_tools(plain, SERVER, ("PATH",))
        try:
            frozen, untouched = [int((await called(each, "pid")).content) for each in (one, other)]
            with monkeypatch.context() as sooner:
                sooner.setattr(mcp_tools, "DOUBT_S", 0.5)
                sooner.setattr(mcp_tools, "PROBE_S", 0.5)
                with pytest.raises(ToolFault, match=r"answered nothing for .* and is killed"):
                    await called(one, "freeze")
            assert int((await called(one, "pid")).content) != frozen
            assert int((await called(other, "pid")).content) == untouched
            await asyncio.to_thread(
                psutil.wait_procs, [psutil.Process(frozen)] if psutil.pid_exists(frozen) else [], 30
            )
            assert not psutil.pid_exists(frozen)
        finally:
            await one.close()
            await other.close()

    asyncio.run(play())


def test_calls_that_take_long_end_no_server_that_lists_its_tools(plain, monkeypatch):
    async def play():
        here = with_mcp_tools(plain, SERVER)
        try:
            first = (await called(here, "pid")).content
            with monkeypatch.context() as sooner:
                sooner.setattr(mcp_tools, "DOUBT_S", 0.2)
                sooner.setattr(mcp_tools, "PROBE_S", 30.0)
                holding = [asyncio.ensure_future(called(here, "hold")) for _ in range(3)]
                ended, _ = await asyncio.wait(holding, timeout=2.0)
                assert not ended, "they still have time"
                for each in holding:
                    each.cancel()
            assert (await called(here, "pid")).content == first
        finally:
            await here.close()

    asyncio.run(play())


def test_calls_in_a_row_that_no_answer_comes_to_in_their_time_end_their_server(plain, monkeypatch):
    monkeypatch.setattr(mcp_tools, "TIMEOUT_S", 1.0)
    short = with_mcp_tools(plain, SERVER)
    monkeypatch.undo()

    async def play():
        here = with_mcp_tools(plain, SERVER)
        try:
            first = (await called(here, "pid")).content
            (server,) = mcp_tools._servers.values()
            life = server._life
            with monkeypatch.context() as sooner:
                sooner.setattr(mcp_tools, "TIMEOUT_S", 1.0)
                sooner.setattr(mcp_tools, "SLACK_S", 0.5)
                for _ in range(2):
                    ends = await asyncio.gather(*(called(short, "hold") for _ in range(3)))
                    assert [end.status for end in ends] == [ToolStatus.TIMEOUT] * 3
                assert (await called(here, "pid")).content == first, "of calls at once one counts"
                await called(short, "hold")
                await called(here, "pid")
                assert server._life is life, "others were answered in between"
                for _ in range(3):
                    await called(short, "hold")
                await asyncio.wait_for(asyncio.wrap_future(server._submit(life.stop.wait())), 30)
            assert (await called(here, "pid")).content != first
        finally:
            await short.close()
            await here.close()

    asyncio.run(play())


def test_an_answer_that_cannot_be_read_fails_its_call_alone(plain):
    async def play():
        here = with_mcp_tools(plain, SERVER)
        try:
            first = (await called(here, "pid")).content
            for _ in range(mcp_tools.MOST_LOST):
                with pytest.raises(ToolFault, match=r"failed: .*CallToolResult"):
                    await called(here, "nonsense")
            assert (await called(here, "pid")).content == first
        finally:
            await here.close()

    asyncio.run(play())


def test_a_server_that_is_lost_again_and_again_rests(plain):
    async def play():
        here = with_mcp_tools(plain, SERVER)
        (server,) = mcp_tools._servers.values()
        try:
            for _ in range(mcp_tools.MOST_LOST):
                with pytest.raises(ToolFault, match="ended during a call"):
                    await called(here, "die")
            with pytest.raises(ToolFault, match=r"started 3 times in a row without an answer .* again in"):
                await called(here, "pid")
            assert server.starts == 3
            server._rests_until_s = 0.0
            assert int((await called(here, "pid")).content) and server.starts == 4
            with pytest.raises(ToolFault, match="ended during a call"):
                await called(here, "die")
            assert int((await called(here, "pid")).content), "it answered in between"
        finally:
            await here.close()

    asyncio.run(play())


def test_it_has_variables_by_name_and_no_others(plain, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY"):
        monkeypatch.setenv(name, "secret")

    async def play():
        without, given = with_mcp_tools(plain, SERVER), with_mcp_tools(plain, SERVER, ("SEARCH_API_KEY",))
        try:
            seen = {}
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY", "PATH"):
                seen[name] = [(await called(each, "variable", key=name)).content for each in (without, given)]
        finally:
            await without.close()
            await given.close()
        path = [os.environ["PATH"]] * 2
        hidden = ["none", "none"]
        assert seen == {
            "HF_TOKEN": hidden, "AWS_SECRET_ACCESS_KEY": hidden, "SEARCH_API_KEY": ["none", "secret"], "PATH": path,
        }  # fmt: skip

    asyncio.run(play())
    with pytest.raises(ConfigError, match=r"environment\.tools_env: NOT_SET: not set .* type export NOT_SET=\.\.\."):
        with_mcp_tools(plain, SERVER, ("PATH", "NOT_SET"))
    assert not mcp_tools._servers


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["/nowhere/server", f"{sys.executable} -c pass", " ", "python 'server.py"])
def test_a_command_that_is_no_server_is_named(plain, command):
    with pytest.raises(ConfigError, match=r"environment\.tools\.mcp: .* offers no tools"):
        with_mcp_tools(plain, command)
    assert not mcp_tools._servers


def test_two_tools_of_one_name_are_refused(plain):
    both = with_mcp_tools(plain, SERVER)
    with pytest.raises(ConfigError, match="has a tool 'add', and so has"):
        with_mcp_tools(both, SERVER)
    asyncio.run(both.close())
    assert not mcp_tools._servers, "what was refused does not keep the server"


def test_odd_schemas_of_a_server_fail_no_call(plain, monkeypatch):
    schema = {
        "properties": {"a": True, "b": {"type": [["x"]], "enum": 3}, "c": {"type": "integer"}},
        "required": ["c", "d", 1],
    }
    odd = [SimpleNamespace(name="odd", description=None, input_schema=schema)]
    odd.append(SimpleNamespace(name="none", description="", input_schema={"properties": None, "required": None}))
    monkeypatch.setattr(McpServer, "tools", lambda self: odd)

    async def said(self, name, arguments):
        return name

    monkeypatch.setattr(McpServer, "call", said)

    async def play():
        both = with_mcp_tools(plain, "odd")
        try:
            assert (await called(both, "odd", a=[1], b="y", c=2)).content == "odd"
            assert (await called(both, "odd", a=1)).status is ToolStatus.MALFORMED
            assert (await called(both, "none")).content == "none"
        finally:
            await both.close()

    asyncio.run(play())


def test_a_server_whose_list_of_tools_does_not_end_is_named(monkeypatch):
    class Endless:
        async def list_tools(self, cursor):
            await asyncio.sleep(0)
            return SimpleNamespace(tools=["tool"] * 100, next_cursor="more")

    async def ready():
        return Endless()

    server = McpServer("endless")
    monkeypatch.setattr(server, "_alive", lambda: SimpleNamespace(ready=ready()))
    with pytest.raises(ConfigError, match="its list of tools does not end"):
        server.tools()
    server.close()
