"""What agents' processes print, however much and whatever: the program that runs them goes on, and so do its other agents."""

import asyncio
import os
import stat
import sys
from contextlib import asynccontextmanager

import pytest
from coroutine_tests import inside

from libra.agents.gateway import Gateway
from libra.agents.processes import AgentProcesses
from libra.config import config_from_dict
from libra.config.cross_field_checks import GATEWAY_VARIABLES
from libra.errors import ConfigError

pytestmark = pytest.mark.live

AGENT = f"""{sys.executable} -c 'import os; exec(os.environ["WHAT"])'"""
TASK = {"messages": [], "facts": {}}


LEAVES = """
import ctypes, signal
ready, said = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark = os.open(os.environ["MARK"], os.O_WRONLY)
        os.write(mark, b"here")
        os.write(said, b"x")
        signal.pause()
    os._exit(0)
os.wait()
os.read(ready, 1)
ctypes.CDLL(None).prctl(1, 0)
{then}
"""
"""An agent that leaves a process in a session of its own; that has the pipe at MARK open as long as it lives."""


@asynccontextmanager
async def agents(**options):
    processes = AgentProcesses(**({"function": None, "command": AGENT, "venv": None} | options))
    try:
        yield processes
    finally:
        await processes.close()


def with_agents(**options):
    return inside(lambda: agents(**options))


async def end_of(processes, what):
    ended = asyncio.get_running_loop().create_future()
    env = {"WHAT": what, "OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}
    await processes.start(env, TASK, ended.set_result)
    return await asyncio.wait_for(ended, 60)


@pytest.mark.parametrize(
    ("what", "begins", "length"),
    [("print('[' * 100_000)", "[[", 100_000), ("os.write(1, b'\\xff' * 1_000_000)", "\ufffd\ufffd", 1_000_000)],
)
@with_agents()
async def test_a_result_that_cannot_be_told_as_json_is_text(processes, what, begins, length):
    ended = await end_of(processes, what)
    assert (ended.error, ended.lost) == (None, False)
    assert ended.result.startswith(begins) and len(ended.result) == length


@pytest.mark.parametrize("number", [1, 2])
@with_agents()
async def test_endless_output_takes_no_disk_and_stops_no_other_agent(processes, number):
    kind = (await end_of(processes, f"print(os.fstat({number}).st_mode)")).result
    assert stat.S_ISFIFO(kind), "what is written to a file fills the disk"
    endless = f"while True: os.write({number}, b'x' * 65536)"
    told = []
    flood = await processes.start({"WHAT": endless}, TASK, told.append)
    assert (await end_of(processes, "print(7)")).result == 7
    processes.stop(flood)
    failed = await end_of(processes, "os.write(2, b'x' * 500_000 + b'the end'); os._exit(3)")
    assert str(failed.error).endswith("the end")
    assert not told


@with_agents(env=["SEARCH_API_KEY"])
async def test_an_agent_has_variables_by_name_and_no_others(processes, monkeypatch):
    secret = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JOB_ID", "LIBRA_ANYTHING"]
    for name in [*secret, "SEARCH_API_KEY", "LC_ALL", "https_proxy"]:
        monkeypatch.setenv(name, "C")
    seen = (await end_of(processes, "import json; print(json.dumps(dict(os.environ)))")).result
    assert not seen.keys() & set(secret)
    assert {"SEARCH_API_KEY", "LC_ALL", "https_proxy", "PATH", "OPENAI_BASE_URL"} <= seen.keys()
    assert seen["no_proxy"] == seen["NO_PROXY"] == "127.0.0.1,localhost"


@with_agents(env=["PATH", "NOT_SET"])
async def test_a_variable_that_is_not_set_is_told_before_anything_runs(processes):
    with pytest.raises(ConfigError, match=r"agent\.env"):
        await processes.prepare()
    with pytest.raises(ConfigError, match=r"agent\.env"):
        config_from_dict({"agent": {"command": "x", "env": ["OPENAI_API_KEY"]}})
    assert Gateway().environ("token").keys() == GATEWAY_VARIABLES


async def left_at(processes, mark, then):
    """Start an agent that leaves a process; its number, its end, and the pipe that ends with that process."""
    os.mkfifo(mark)
    ended = asyncio.get_running_loop().create_future()
    what = LEAVES.format(then=then)
    number = await processes.start({"WHAT": what, "MARK": str(mark)}, TASK, ended.set_result)
    pipe = await asyncio.to_thread(os.open, mark, os.O_RDONLY)
    assert await asyncio.to_thread(os.read, pipe, 4) == b"here"
    return number, ended, pipe


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what leaves its session leaves its agent")
@with_agents()
async def test_what_an_agent_leaves_ends_with_it_and_not_with_another_one(processes, tmp_path):
    pauses = "signal.pause()"
    # What it does last, and whether that ends it.
    ways = {"it ends": ("", True), "it fails": ("raise SystemExit(3)", True), "it is stopped": (pauses, False)}
    _, others_end, other = await left_at(processes, tmp_path / "other", pauses)
    os.set_blocking(other, False)
    for way, (then, ends) in ways.items():
        number, ended, pipe = await left_at(processes, tmp_path / way, then)
        if ends:
            assert ((await asyncio.wait_for(ended, 60)).error is None) == (way == "it ends"), way
        else:
            processes.stop(number)
        assert await asyncio.wait_for(asyncio.to_thread(os.read, pipe, 1), 60) == b"", way
        with pytest.raises(BlockingIOError):  # what the other one left lives
            os.read(other, 1)
        os.close(pipe)
    assert not others_end.done()
    os.set_blocking(other, True)
    await processes.close()
    assert await asyncio.wait_for(asyncio.to_thread(os.read, other, 1), 60) == b""
    os.close(other)


@with_agents(function="http_agents:task", command=None)
async def test_agents_that_are_tasks_share_a_process_and_have_their_own_variables(processes):
    told = {}

    async def start(number, what):
        ended = asyncio.get_running_loop().create_future()
        env = {"OPENAI_BASE_URL": f"http://{number}", "OPENAI_API_KEY": ""}
        told[number] = ended
        return await processes.start(env, TASK | {"facts": {"what": what}}, ended.set_result)

    for number, what in enumerate(("meets", "meets", "raises", "exits", "hangs")):
        last = await start(number, what)
    first, second, raised, left = [await asyncio.wait_for(told[number], 60) for number in range(4)]
    assert first.result["pid"] == second.result["pid"] != os.getpid()
    assert [each.result["url"] for each in (first, second)] == ["http://0", "http://1"]
    assert str(raised.error).splitlines()[0] == "it ended with status 1: ValueError: no"
    assert left.error == "it ended with status 3"
    processes.stop(last)
    assert not told[4].done()
