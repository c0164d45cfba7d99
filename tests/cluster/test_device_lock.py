"""One action at a time on a device, among real processes: in order, also where a holder is killed."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from libra.cluster.device_lock import DIRECTORY_VARIABLE, DeviceLock, GpuTurns, lock_directory
from libra.cluster.hardware_inventory import VisibleGpu, machine_gpus, tool_gpus, visible_gpus
from libra.config import config_from_dict
from libra.errors import ClusterError, ToolFault

TAKES_TURNS = """
import asyncio, sys, time
from pathlib import Path
from libra.cluster.device_lock import DeviceLock

async def turns(directory, who, count):
    lock = DeviceLock("GPU-1", Path(directory))
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        turn = await lock.taken(who, 60.0)
        began_s = time.monotonic()
        await asyncio.sleep(0.005)
        print(who, turn._number, began_s, time.monotonic(), flush=True)
        turn.release()

asyncio.run(turns(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""
HOLDS = """
import asyncio, os, sys, time
from pathlib import Path
from libra.cluster.device_lock import DeviceLock

asyncio.run(DeviceLock("GPU-1", Path(sys.argv[1])).taken("service judge", 60.0))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def process(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.live
def test_processes_have_a_device_one_after_the_other_in_the_order_in_which_they_asked(tmp_path):
    count = 25
    started = [process(TAKES_TURNS, tmp_path, name, count) for name in "abc"]
    for each in started:  # all of them want it at once
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in started:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    rows = [line.split() for each in started for line in each.communicate(timeout=60)[0].splitlines()]
    held = sorted((float(began), float(ended), int(number), name) for name, number, began, ended in rows)
    assert [number for _, _, number, _ in held] == list(range(1, 3 * count + 1))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(held))
    assert sum(before[3] != after[3] for before, after in itertools.pairwise(held)) > 3  # they took turns


@pytest.mark.live
def test_a_killed_holder_has_nothing_though_its_child_lives(tmp_path, caplog):
    caplog.set_level("INFO")
    holder = process(HOLDS, tmp_path)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())

    async def wait():
        lock = DeviceLock("GPU-1", tmp_path)
        with pytest.raises(ToolFault, match=f"process {holder.pid}, service judge"):
            await lock.taken("tool run_tests", 0.05)
        waiting = asyncio.ensure_future(lock.taken("tool run_tests", 60.0))
        beats = 0
        while not caplog.records:  # the event loop goes on
            await asyncio.sleep(0)
            beats += 1
        assert beats > 2 and not waiting.done()
        holder.send_signal(signal.SIGKILL)
        turn = await waiting
        turn.release()
        return turn.waited_s

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("libra.cluster.device_lock.SAY_AFTER_S", 0.1)
            assert asyncio.run(wait()) > 0.1
        os.kill(child, 0)  # it still lives
        assert f"tool run_tests waits for device GPU-1 for 0 s; it is held by process {holder.pid}" in caplog.text
    finally:
        os.kill(child, signal.SIGKILL)
        holder.wait()


def test_who_no_longer_waits_holds_nobody_up(tmp_path):
    async def turns():
        lock = DeviceLock("GPU-1", tmp_path)
        first = await lock.taken("one", 1.0)
        waits = [DeviceLock("GPU-1", tmp_path).taken(who, 60.0) for who in ("two", "three")]
        gone, next_one = map(asyncio.ensure_future, waits)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert not next_one.done()
        first.release()
        assert not first.others_came
        (await next_one).release()
        (tmp_path / "GPU-1").unlink()  # as what cleans /tmp does
        (await lock.taken("four", 1.0)).release()
        assert (tmp_path / "GPU-1").exists()

    asyncio.run(turns())


def test_calls_with_gpus_have_different_ones_and_wait_where_others_have_them(tmp_path):
    gpus = visible_gpus("3,5", ())

    async def calls():
        mine, yours = GpuTurns(gpus, tmp_path), GpuTurns(gpus[:1], tmp_path)
        held = [await mine.taken(1, "tool f", 1.0) for _ in gpus]
        assert sorted(entry for each in held for entry in each.entries) == ["3", "5"]
        with pytest.raises(ToolFault, match="device gpu-3 was not free"):
            await yours.taken(1, "tool g", 0.02)
        with pytest.raises(ToolFault, match="takes 2 GPUs, and its worker sees 1"):
            await yours.taken(2, "tool g", 1.0)
        for each in held:
            each.release()
        assert (await yours.taken(1, "tool g", 1.0)).entries == ("3",)

    asyncio.run(calls())


def test_a_gpu_has_one_name_however_a_process_sees_it(tmp_path):
    machine = ("GPU-aa11", "GPU-bb22", "GPU-bb33")
    seen = {
        None: machine, "1": machine[1:2], "2,0": (machine[2], machine[0]), "GPU-aa": machine[:1], "1,-1,0": machine[1:2], "": (),
        "GPU-bb": ("GPU-bb",), "MIG-7": ("MIG-7",), "7": ("gpu-7",),
    }  # fmt: skip
    for visible, names in seen.items():
        assert tuple(gpu.name for gpu in visible_gpus(visible, machine)) == names, visible
    assert visible_gpus(None, (), least=2) == (VisibleGpu("0", "gpu-0"), VisibleGpu("1", "gpu-1"))
    for number, uuid in enumerate(machine):
        file = tmp_path / f"0000:{number}1:00.0" / "information"
        file.parent.mkdir()
        file.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")
        if number != 1:  # which this process may not open
            (tmp_path / f"nvidia{number}").touch()
    assert machine_gpus(tmp_path, tmp_path) == (machine[0], machine[2])
    assert machine_gpus(tmp_path / "none", tmp_path) == ()
    config = config_from_dict({"cluster": {"tool_workers": 3, "tool_supply": {"gpus": 1}}})
    seen = visible_gpus("0,1", ())  # tool workers have different ones as far as there are enough
    assert [gpu.entry for index in range(3) for gpu in tool_gpus(config, index, seen)] == ["0", "1", "0"]


def test_a_directory_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr("libra.cluster.device_lock.os.geteuid", lambda: 10**8)  # the directory is another user's
    place = Path("/tmp/libra-devices-100000000")
    place.mkdir()
    try:
        with pytest.raises(ClusterError, match="LIBRA_DEVICE_LOCKS=DIR"):
            lock_directory()
    finally:
        place.rmdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "no" / "place"))
    with pytest.raises(ClusterError):
        lock_directory()
