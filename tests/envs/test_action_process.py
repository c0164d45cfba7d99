"""Calls in processes of their own: cores, memory, time-outs, and what is left of them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from libra.cluster.device_lock import GpuTurns
from libra.cluster.gpu_names import visible_gpus
from libra.envs import action_process
from libra.envs.action_process import ActionProcesses, Bounds, CoreSet
from libra.errors import ToolFault

CORES = sorted(os.sched_getaffinity(0))
MIB = 2**20
PARENT = os.getpid()


def where() -> str:
    return f"{sorted(os.sched_getaffinity(0))} {os.environ.get('OMP_NUM_THREADS', '')}"


def broken() -> str:
    raise ValueError("no")


def faulty() -> str:
    raise ToolFault("the service is down")


def hoard(num_bytes: int) -> str:
    return str(len(bytearray(num_bytes)))


def leaves_a_child(pid_file: str) -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Path(pid_file).write_text(str(child.pid))
    child.wait()
    return "never"


def waits() -> str:
    """Under a name by which it is found."""
    Path("/proc/self/comm").write_text(f"call-{PARENT}")
    while True:
        os.read(os.pipe()[0], 1)


def of_this_user() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def named(pid: int) -> str:
    """The name of a process that has not ended."""
    try:
        return "" if ended(pid) else Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def says(text: str) -> str:
    """What the process of a call writes where only its return should come."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                os.write(int(path.name), len(text).to_bytes(8) + text.encode())
    os._exit(0)


def waits_for(flag: str, begun: str) -> str:
    Path(begun).touch()
    while not Path(flag).exists():
        os.sched_yield()
    return "done"


def dies() -> str:
    os.kill(os.getpid(), 9)
    return "never"


def in_loop(test: Callable[..., Any]) -> Callable[..., Any]:
    """An async test as a plain one."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


def written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # its name may have spaces
    except OSError:
        return True


def gone(pid: int) -> bool:
    """Whether all threads of a process have ended, with which its sockets close."""
    try:
        return ended(pid) and len(list(Path(f"/proc/{pid}/task").iterdir())) < 2
    except OSError:
        return True


@asynccontextmanager
async def started(*functions: Callable[..., Any], gpus: GpuTurns | None = None) -> AsyncIterator[ActionProcesses]:
    processes = ActionProcesses({each.__name__: each for each in functions}, CORES, str, gpus)
    try:
        yield processes
    finally:
        processes.close()


@in_loop
async def test_a_call_is_bound_to_its_cores_and_others_to_others() -> None:
    async with started(where) as processes:
        ran = await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert ran is not None
        assert ran.text == f"[{CORES[0]}] 1"
        assert processes.cores.free == tuple(CORES)


def test_cores_are_given_once_and_shared_only_if_too_many_are_wanted() -> None:
    cores = CoreSet([3, 5, 7])
    first, second = cores.take(2), cores.take(1)
    assert (first, second) == ((3, 5), (7,))
    assert len(set(cores.take(2))) == 2
    cores.give_back(first)
    assert cores.free == (3, 5)


@in_loop
async def test_an_error_is_text_with_its_name_and_a_fault_stays_one() -> None:
    async with started(broken, faulty) as processes:
        error = await processes.run("broken", {}, 30.0, Bounds(cores=1))
        fault = await processes.run("faulty", {}, 30.0, Bounds(cores=1))
    assert error is not None
    assert fault is not None
    assert (error.error, error.text, error.fault) == ("ValueError", "no", False)
    assert (fault.text, fault.fault) == ("the service is down", True)


@in_loop
async def test_one_that_takes_too_much_memory_is_killed_alone() -> None:
    async with started(hoard) as processes:
        bounds = Bounds(cores=0, memory_bytes=128 * MIB)
        too_much = processes.run("hoard", {"num_bytes": 512 * MIB}, 30.0, bounds)
        enough = processes.run("hoard", {"num_bytes": 16 * MIB}, 30.0, bounds)
        first, second = await asyncio.gather(too_much, enough, return_exceptions=True)
    assert isinstance(first, ToolFault)
    assert "took more than its 0.125 GiB of memory" in str(first)
    assert second is not None
    assert not isinstance(second, BaseException)
    assert second.text == str(16 * MIB)


@in_loop
async def test_a_time_out_ends_the_call_and_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with started(leaves_a_child) as processes:
        assert await processes.run("leaves_a_child", {"pid_file": str(pid_file)}, 2.0, Bounds(1)) is None
        assert processes.cores.free == tuple(CORES)
        child = int(pid_file.read_text())
        while not ended(child):  # noqa: ASYNC110 it is another process that ends
            await asyncio.sleep(0)


@pytest.mark.parametrize("steps", range(12))
def test_a_call_that_is_cut_off_at_any_moment_leaves_no_process(steps: int) -> None:
    """Also before the worker has read its pid."""

    async def cut() -> int:
        async with started(waits) as processes:
            running = asyncio.ensure_future(processes.run("waits", {}, 3600.0, Bounds(1)))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while asyncio.all_tasks() - {asyncio.current_task()}:  # noqa: ASYNC110 until the pid is read, and the group killed
                await asyncio.sleep(0)
            return processes._pid

    starter = asyncio.run(cut())
    assert starter == 0 or ended(starter)
    while any(named(pid) == f"call-{PARENT}" for pid in of_this_user()):  # killed, and not gone yet
        os.sched_yield()


def test_calls_end_with_the_worker(tmp_path: Path) -> None:
    """A worker that is killed closes its socket, as closing does; the call's child is killed, too."""
    pid_file = tmp_path / "pid"

    async def leave() -> None:
        processes = ActionProcesses({"leaves_a_child": leaves_a_child}, CORES, str)
        running = asyncio.ensure_future(processes.run("leaves_a_child", {"pid_file": str(pid_file)}, 3600.0, Bounds(1)))
        while not written(pid_file):  # noqa: ASYNC110 it is another process that writes
            await asyncio.sleep(0)
        processes.close()
        with pytest.raises(ToolFault, match="its process died"):
            await running

    asyncio.run(leave())
    while not ended(int(pid_file.read_text())):
        pass


@in_loop
async def test_a_process_that_dies_is_a_fault_and_twenty_of_them_leave_nothing() -> None:
    async with started(dies, where) as processes:
        for _ in range(20):
            with pytest.raises(ToolFault, match="its process died"):
                await processes.run("dies", {}, 30.0, Bounds(cores=1))
        assert processes.cores.free == tuple(CORES)
        assert await processes.run("where", {}, 30.0, Bounds(cores=1)) is not None


@in_loop
async def test_the_process_that_waits_for_the_next_call_may_be_killed() -> None:
    async with started(where) as processes:
        assert await processes.run("where", {}, 30.0, Bounds(cores=1)) is not None
        waiting = children(processes._pid)  # those of later have their place by and by
        for pid in waiting:
            os.kill(pid, 9)
        while not all(map(gone, waiting)):  # noqa: ASYNC110 other processes end
            await asyncio.sleep(0)
        again = await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert again is not None
        assert again.text == f"[{CORES[0]}] 1"
        spares = children(processes._pid)
    while not all(map(ended, spares)):  # it ends with the starter  # noqa: ASYNC110
        await asyncio.sleep(0)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@in_loop
async def test_a_starter_that_is_killed_is_followed_by_another_one() -> None:
    async with started(where) as processes:
        await processes.run("where", {}, 30.0, Bounds(cores=1))
        first = processes._pid
        os.kill(first, 9)
        await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
        ran = await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert ran is not None and ran.text == f"[{CORES[0]}] 1"
        assert processes._pid != first


OUTCOME = '{"text": "", "error": "", "fault": false, "refused": null, "ran_s": %s}'


@in_loop
async def test_what_the_process_of_a_call_makes_up_is_a_fault_of_its_call() -> None:
    async with started(says) as processes:
        for text in ("no JSON", "[]", "{}", "[" * 100_000, OUTCOME % "NaN", OUTCOME % "-1"):
            with pytest.raises(ToolFault, match="what its process said cannot be read"):
                await processes.run("says", {"text": text}, 30.0, Bounds(cores=1))
        assert processes.cores.free == tuple(CORES)


@in_loop
async def test_a_machine_that_starts_no_process_fails_new_calls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, end, begun, fork = tmp_path / "full", tmp_path / "end", tmp_path / "begun", os.fork

    def bounded() -> int:
        if full.exists():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", bounded)
    async with started(where, waits_for) as processes:
        given = {"flag": str(end), "begun": str(begun)}
        running = asyncio.ensure_future(processes.run("waits_for", given, 60.0, Bounds(cores=1)))
        while not begun.exists():  # noqa: ASYNC110 another process begins
            await asyncio.sleep(0)
        full.touch()
        two = [processes.run("where", {}, 30.0, Bounds()) for _ in range(2)]  # one may have the process that waited
        _, failed = await asyncio.gather(*two, return_exceptions=True)
        assert isinstance(failed, ToolFault) and "no process could be started for its call" in str(failed)
        full.unlink()
        end.touch()
        ran = await running
        assert ran is not None and ran.text == "done"
        assert await processes.run("where", {}, 30.0, Bounds(cores=1)) is not None


@in_loop
async def test_a_worker_without_descriptors_fails_its_calls_and_keeps_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> None:
        raise OSError(24, "Too many open files")

    async with started(where) as processes:
        with monkeypatch.context() as full:
            full.setattr(action_process.socket, "socketpair", none)
            with pytest.raises(ToolFault, match="no process could be started for its call: Too many open files"):
                await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert processes.cores.free == tuple(CORES)


@in_loop
async def test_a_starter_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_process, "END_S", 0.1)
    async with started(where) as processes:
        await processes.run("where", {}, 30.0, Bounds(cores=1))
        first = processes._pid
        os.kill(first, signal.SIGSTOP)
        with monkeypatch.context() as soon:
            soon.setattr(action_process, "BEGIN_S", 0.5)
            with pytest.raises(ToolFault, match=r"no process began its call within 0\.5 s"):
                await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert await processes.run("where", {}, 30.0, Bounds(cores=1)) is not None
        assert ended(first) and processes._pid != first


def on_gpu(seconds: float) -> str:
    began_s = time.monotonic()
    threading.Event().wait(seconds)
    return f"{os.environ['CUDA_VISIBLE_DEVICES']} {began_s} {time.monotonic()}"


def hangs() -> str:
    threading.Event().wait()
    return "never"


@in_loop
async def test_calls_of_two_workers_have_a_gpu_one_after_the_other(tmp_path: Path) -> None:
    async with AsyncExitStack() as both:
        workers = [
            await both.enter_async_context(started(on_gpu, hangs, gpus=GpuTurns(visible_gpus("4", ()), tmp_path)))
            for _ in range(2)
        ]
        bounds = Bounds(cores=1, gpus=1)
        assert await workers[0].run("hangs", {}, 0.1, bounds) is None  # its process has let go of the GPU
        calls = [worker.run("on_gpu", {"seconds": 0.02}, 30.0, bounds) for worker in workers for _ in range(3)]
        found = [ran.text.split() for ran in await asyncio.gather(*calls) if ran is not None]
        rows = sorted(found, key=lambda row: float(row[1]))
        assert [row[0] for row in rows] == ["4"] * 6
        assert all(float(before[2]) <= float(after[1]) for before, after in itertools.pairwise(rows))
        waiting = asyncio.ensure_future(workers[0].run("hangs", {}, 60.0, bounds))
        behind = asyncio.ensure_future(workers[1].run("on_gpu", {"seconds": 0.0}, 30.0, bounds))
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await behind) is not None
