"""Tools of a real MCP server: shared by what a process has, restarted after a crash, ended with the last environment."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mcp", reason="pip install -e '.[mcp]'")


from libra.config import config_from_dict
from libra.envs import make_environment, mcp_tools, run_action
from libra.envs.mcp_tools import with_mcp_tools
from libra.errors import ConfigError, ToolFault
from libra.types import ToolCall, ToolStatus
from libra.worker.run_spec import RunSpec

SERVER = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'mcp_calculator.py'}"
OFFERED = ["add", "fail", "pid", "variable", "freeze", "nonsense", "leave", "die"]


pytestmark = pytest.mark.live


@pytest.fixture
def plain():
    return make_environment("tool_arithmetic", {}, 0)


@asynccontextmanager
async def served(plain, *variables):
    environment = with_mcp_tools(plain, SERVER, variables)
    yield environment
    await environment.close()


def called(environment, name, **arguments):
    return run_action(environment, environment.prompt("train", 0), ToolCall(name, arguments), action_id="a")


async def test_its_tools_are_beside_the_environments_own(plain):
    async with served(plain) as both:
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


async def test_one_server_for_a_process_and_another_after_a_crash(plain):
    one, other = with_mcp_tools(plain, SERVER), with_mcp_tools(plain, SERVER)
    first = int((await called(one, "pid")).content)
    assert int((await called(other, "pid")).content) == first
    left = psutil.Process(int((await called(one, "leave")).content))
    with pytest.raises(ToolFault):
        await called(one, "die")
    second = int((await called(other, "pid")).content)
    assert second != first and not left.is_running(), "what it left ends with it"
    await one.close()
    assert int((await called(other, "pid")).content) == second, "another environment still uses it"
    await other.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_a_run_names_it_in_its_configuration(tmp_path):
    config = config_from_dict({"environment": {"tools": {"mcp": SERVER}}})
    environment = RunSpec("run", 0, tmp_path, "", config).make_environment()
    assert [tool.name for tool in environment.tools] == ["calculator", *OFFERED]
    await environment.close()


async def test_a_server_that_is_stopped_is_killed_and_replaced_and_others_go_on(plain, monkeypatch):
    async with served(plain) as one, served(plain, "PATH") as other:
        frozen, untouched = [int((await called(each, "pid")).content) for each in (one, other)]
        monkeypatch.setattr(mcp_tools, "TIMEOUT_S", 1.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(called(one, "freeze"), 1.0)
        assert int((await called(one, "pid")).content) != frozen
        assert int((await called(other, "pid")).content) == untouched
        left = [psutil.Process(frozen)] if psutil.pid_exists(frozen) else []
        await asyncio.to_thread(psutil.wait_procs, left, 30)
        assert not psutil.pid_exists(frozen)


async def test_an_answer_that_cannot_be_read_fails_its_call_alone(plain):
    async with served(plain) as here:
        first = (await called(here, "pid")).content
        for _ in range(3):
            with pytest.raises(ToolFault):
                await called(here, "nonsense")
        assert (await called(here, "pid")).content == first


async def test_it_has_variables_by_name_and_no_others(plain, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY"):
        monkeypatch.setenv(name, "secret")

    async with served(plain) as without, served(plain, "SEARCH_API_KEY") as given:
        seen = {}
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY", "PATH"):
            seen[name] = [(await called(each, "variable", key=name)).content for each in (without, given)]
    hidden = {key: ["none", "none"] for key in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY")}
    assert seen == hidden | {"SEARCH_API_KEY": ["none", "secret"], "PATH": [os.environ["PATH"]] * 2}
    with pytest.raises(ConfigError, match=r"environment\.tools_env"):
        with_mcp_tools(plain, SERVER, ("PATH", "NOT_SET"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["/nowhere/server", f"{sys.executable} -c pass", "python 'server.py"])
def test_a_command_that_is_no_server_is_named(plain, command):
    with pytest.raises(ConfigError, match=r"environment\.tools\.mcp"):
        with_mcp_tools(plain, command)
