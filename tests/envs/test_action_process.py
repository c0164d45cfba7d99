"""Calls in processes of their own: cores, memory, time-outs, and what is left of them."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from libra.cluster.device_lock import GpuTurns
from libra.cluster.hardware_inventory import visible_gpus
from libra.envs import action_process
from libra.envs.action_process import ActionProcesses, Bounds, CoreSet
from libra.errors import ToolFault

pytestmark = pytest.mark.live

CORES = sorted(os.sched_getaffinity(0))
MIB = 2**20
PARENT = os.getpid()


def where():
    return f"{sorted(os.sched_getaffinity(0))} {os.environ.get('OMP_NUM_THREADS', '')}"


def starter():
    return str(os.getppid())


def broken():
    raise ValueError("no")


def faulty():
    raise ToolFault("the service is down")


def hoard(num_bytes):
    return str(len(bytearray(num_bytes)))


def leaves_a_child(pid_file):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Path(pid_file).write_text(str(child.pid))
    child.wait()
    return "never"


def waits():
    """Under a name by which it is found."""
    Path("/proc/self/comm").write_text(f"call-{PARENT}")
    while True:
        os.read(os.pipe()[0], 1)


def says(text):
    """Write where only the return of a call should come."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                os.write(int(path.name), len(text).to_bytes(8) + text.encode())
    os._exit(0)


def dies():
    os.kill(os.getpid(), 9)
    return "never"


def on_gpu(seconds):
    began_s = time.monotonic()
    threading.Event().wait(seconds)
    return f"{os.environ['CUDA_VISIBLE_DEVICES']} {began_s} {time.monotonic()}"


def hangs():
    threading.Event().wait()
    return "never"


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # its name may have spaces
    except OSError:
        return True


def named(pid):
    try:
        return "" if ended(int(pid)) else Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@asynccontextmanager
async def started(*functions, gpus=None):
    processes = ActionProcesses({each.__name__: each for each in functions}, CORES, str, gpus)
    try:
        yield processes
    finally:
        processes.close()


async def test_a_call_is_bound_to_its_cores_and_its_end_gives_them_back():
    async with started(where) as processes:
        ran = await processes.run("where", {}, 30.0, Bounds(cores=1))
        assert ran.text == f"[{CORES[0]}] 1"
        assert processes.cores.free == tuple(CORES)


def test_cores_are_given_once_and_shared_only_if_too_many_are_wanted():
    cores = CoreSet([3, 5, 7])
    first, second = cores.take(2), cores.take(1)
    assert (first, second) == ((3, 5), (7,))
    assert len(set(cores.take(2))) == 2
    cores.give_back(first)
    assert cores.free == (3, 5)


async def test_an_error_is_text_with_its_name_and_a_fault_stays_one():
    async with started(broken, faulty) as processes:
        error = await processes.run("broken", {}, 30.0, Bounds(cores=1))
        fault = await processes.run("faulty", {}, 30.0, Bounds(cores=1))
    assert (error.error, error.text, error.fault) == ("ValueError", "no", False)
    assert (fault.text, fault.fault) == ("the service is down", True)


async def test_one_that_takes_too_much_memory_is_killed_alone():
    async with started(hoard) as processes:
        bounds = Bounds(cores=0, memory_bytes=128 * MIB)
        too_much = processes.run("hoard", {"num_bytes": 512 * MIB}, 30.0, bounds)
        enough = processes.run("hoard", {"num_bytes": 16 * MIB}, 30.0, bounds)
        first, second = await asyncio.gather(too_much, enough, return_exceptions=True)
    assert isinstance(first, ToolFault) and "memory" in str(first)
    assert second.text == str(16 * MIB)


async def test_a_time_out_ends_the_call_and_what_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    async with started(leaves_a_child) as processes:
        timeout_s = 0.5
        while not pid_file.exists():  # on a loaded machine its child was not there yet
            assert await processes.run("leaves_a_child", {"pid_file": str(pid_file)}, timeout_s, Bounds(1)) is None
            timeout_s *= 2
        assert processes.cores.free == tuple(CORES)
        while not ended(int(pid_file.read_text())):  # noqa: ASYNC110 it is another process that ends
            await asyncio.sleep(0)


@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_a_call_that_is_cut_off_at_any_moment_leaves_no_process(steps):
    """Also before the worker has read its pid."""

    async with started(waits) as processes:
        running = asyncio.ensure_future(processes.run("waits", {}, 3600.0, Bounds(1)))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while asyncio.all_tasks() - {asyncio.current_task()}:  # noqa: ASYNC110 until the pid is read, and the group killed
            await asyncio.sleep(0)
    while any(named(pid) == f"call-{PARENT}" for pid in os.listdir("/proc") if pid.isdigit()):  # noqa: PTH208
        os.sched_yield()


async def test_processes_that_die_are_faults_of_their_calls_and_leave_nothing():
    async with started(dies, where) as processes:
        for _ in range(5):
            with pytest.raises(ToolFault):
                await processes.run("dies", {}, 30.0, Bounds(cores=1))
        assert processes.cores.free == tuple(CORES)
        assert await processes.run("where", {}, 30.0, Bounds(cores=1)) is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_starter_that_is_killed_or_stopped_is_replaced(number, monkeypatch):
    monkeypatch.setattr(action_process, "END_S", 0.1)
    async with started(starter) as processes:
        ran = await processes.run("starter", {}, 30.0, Bounds(cores=1))
        first = int(ran.text)
        os.kill(first, number)
        if number == signal.SIGSTOP:
            with monkeypatch.context() as soon:
                soon.setattr(action_process, "BEGIN_S", 0.5)
                with pytest.raises(ToolFault):
                    await processes.run("starter", {}, 30.0, Bounds(cores=1))
        else:
            await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again = await processes.run("starter", {}, 30.0, Bounds(cores=1))
        assert int(again.text) != first
        assert ended(first)


OUTCOME = '{"text": "", "error": "", "fault": false, "refused": null, "ran_s": %s}'


async def test_what_the_process_of_a_call_makes_up_is_a_fault_of_its_call():
    async with started(says) as processes:
        for text in ("no JSON", "{}", "[" * 100_000, OUTCOME % "NaN"):
            with pytest.raises(ToolFault, match="cannot be read"):
                await processes.run("says", {"text": text}, 30.0, Bounds(cores=1))
        assert processes.cores.free == tuple(CORES)


async def test_calls_of_two_workers_have_a_gpu_one_after_the_other(tmp_path):
    gpus = [GpuTurns(visible_gpus("4", ()), tmp_path) for _ in range(2)]
    async with started(on_gpu, hangs, gpus=gpus[0]) as one, started(on_gpu, hangs, gpus=gpus[1]) as other:
        workers = [one, other]
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
