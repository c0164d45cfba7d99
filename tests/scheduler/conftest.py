"""A scheduler with Libra's plugin and real workers in this process, and quanta that need no engine."""

import asyncio
import contextlib
import inspect
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, Reschedule, Scheduler, Worker, get_worker

from libra import keys
from libra.cluster.settings import DASK_SETTINGS
from libra.config import config_from_dict
from libra.facts import STREAM_OP, QuantumFinished, VersionPublished, pack
from libra.scheduler import LibraPlugin, RunRegistration
from libra.types import Phase

DONE = {}
"""Quanta finished, by key: what a real trajectory reads in its journal."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def report(key, run, quantum, *, following, goes_on=False, epoch=0):
    """What a worker reports at the end of a quantum; ``following`` is the next phase, None at the end."""
    worker = get_worker()
    phase = Phase.TOOL if worker.name.startswith("tool") else Phase.ROLLOUT
    finished = QuantumFinished(
        key, phase, 1, "", "", 1.0, quantum=quantum, worker=str(worker.name), version=0, stop_s=2.0, goes_on=goes_on,
        end="" if following else "answered", next=str(following or ""), context_tokens=quantum + 1,
    )  # fmt: skip
    worker.batched_send({"op": STREAM_OP, "run": run, "epoch": epoch, "packed": pack([finished])})


async def quantum(key, run, length, epoch=0):
    """Stand-in for a trajectory's task: ``length`` quanta, generations and actions in turn."""
    done = DONE.get(key, 0)
    await asyncio.sleep(0)
    DONE[key] = done + 1
    more = done + 1 < length
    report(key, run, done, following=(Phase.TOOL if done % 2 == 0 else Phase.ROLLOUT) if more else None, epoch=epoch)
    if more:
        raise Reschedule()
    return length


@contextlib.asynccontextmanager
async def cluster(rollout=2, tool=2):
    """Scheduler with ``validate=True``, two workers with slots, a client, the plugin."""
    with dask.config.set(DASK_SETTINGS):
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", validate=True) as scheduler,
            Worker(scheduler.address, name="rollout-0", nthreads=16, resources={"ROLLOUT": rollout, "GRADE": 4}) as a,
            Worker(scheduler.address, name="tool-0", nthreads=16, resources={"TOOL": tool, "COMMIT": 1}) as b,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.register_plugin(LibraPlugin())
            plugin = scheduler.plugins[LibraPlugin.name]
            yield SimpleNamespace(scheduler=scheduler, workers=(a, b), client=client, plugin=plugin)


def config_of(eta=0, iterations=1, groups=1, policy=None, **watchdog):
    """A configuration as a registration has it; without a watchdog, unless its settings are given."""
    sections = {
        "run": {"eta": eta, "iterations": iterations}, "trainer": {"prompts": groups},
        "policy": policy or {"name": "fifo"}, "watchdog": {"timeout_s": None} | watchdog,
    }  # fmt: skip
    return config_from_dict(sections).model_dump(mode="json")


def register(live, directory, run="demo", *, config=None, epoch=0, **more):
    config = config_of() if config is None else config
    answer = live.plugin.register_run(RunRegistration(run, epoch, str(directory), config, **more))
    publish(live, 0, run, epoch)
    return answer


def publish(live, version, run="demo", epoch=0):
    say(live, VersionPublished(version), run=run, epoch=epoch)


def say(live, *facts, run="demo", epoch=0, worker=""):
    """Facts, as a worker at this address or the driver sends them."""
    live.plugin.told(run, epoch, pack(facts), worker)


async def until(condition):
    """Let the event loop go on until something is true that has no event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def submit(live, run, lengths, iteration=0, group=0):
    futures = []
    for sample, length in enumerate(lengths):
        key = keys.make("trajectory", (iteration, group, sample), epoch=0, run=run)
        DONE.pop(key, None)
        futures.append(live.client.submit(quantum, key, run, length, key=key, resources={keys.PARK: 1}))
    return futures


@pytest.fixture(scope="session")
def emulation():
    functions = (cluster, config_of, register, publish, say, submit, quantum, report, until)
    return SimpleNamespace(**{each.__name__: each for each in functions})
