"""What agents' processes print, however much and whatever: the program that runs them goes on, and so do its other agents."""

from __future__ import annotations

import asyncio
import math
import stat
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from libra.agents.processes import AgentProcesses
from libra.agents.session import Ended
from libra.worker.agent_quanta import _reward

AGENT = f"""{sys.executable} -c 'import os; exec(os.environ["WHAT"])'"""
TASK: dict[str, Any] = {"messages": [], "facts": {}}


def with_agents(test: Callable[[AgentProcesses], Awaitable[None]]) -> None:
    async def run() -> None:
        processes = AgentProcesses(function=None, command=AGENT, venv=None)
        try:
            await test(processes)
        finally:
            await processes.close()

    asyncio.run(run())


async def end_of(processes: AgentProcesses, what: str) -> Ended:
    ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    await processes.start({"WHAT": what}, TASK, ended.set_result)
    return await asyncio.wait_for(ended, 60)


@pytest.mark.parametrize(
    ("what", "begins", "length"),
    [
        ("print('[' * 100_000)", "[[", 100_000),
        ("print('[' * 900 + ']' * 900)", "[[", 1800),
        ("os.write(1, b'\\xff' * 1_000_000)", "\ufffd\ufffd", 1_000_000),
    ],
)
def test_a_result_that_cannot_be_told_as_json_is_text(what: str, begins: str, length: int) -> None:
    async def test(processes: AgentProcesses) -> None:
        ended = await end_of(processes, what)
        assert (ended.error, ended.lost) == (None, False)
        assert ended.result.startswith(begins) and len(ended.result) == length

    with_agents(test)


@pytest.mark.parametrize("number", [1, 2])
def test_endless_output_takes_no_disk_and_stops_no_other_agent(number: int) -> None:
    async def test(processes: AgentProcesses) -> None:
        kind = (await end_of(processes, f"print(os.fstat({number}).st_mode)")).result
        assert stat.S_ISFIFO(kind), "what is written to a file fills the disk"
        endless = f"while True: os.write({number}, b'x' * 65536)"
        told: list[Ended] = []
        flood = await processes.start({"WHAT": endless}, TASK, told.append)
        assert (await end_of(processes, "print(7)")).result == 7
        processes.stop(flood)
        failed = await end_of(processes, "os.write(2, b'x' * 500_000 + b'the end'); os._exit(3)")
        assert str(failed.error).endswith("the end")
        assert not told

    with_agents(test)


def test_a_program_that_is_started_again_does_not_lose_the_agents_of_the_next_one() -> None:
    async def test(processes: AgentProcesses) -> None:
        await processes.prepare()
        first, told = processes._program, processes._reading
        assert first is not None and told is not None
        told.cancel()
        late = asyncio.Event()
        processes._reading = asyncio.create_task(tell(late))  # the end of the first one is told late
        first.kill()
        await first.wait()
        preparing = asyncio.create_task(processes.prepare())
        await asyncio.wait({preparing}, timeout=0.5)
        assert processes._program is first
        late.set()
        await preparing
        assert processes._program is not first

    async def tell(late: asyncio.Event) -> None:
        await late.wait()

    with_agents(test)


def test_a_reward_too_large_for_a_float_is_infinite_which_no_grader_takes() -> None:
    assert _reward(None, 10**400) == math.inf and _reward(None, {"reward": 2}) == 2.0
