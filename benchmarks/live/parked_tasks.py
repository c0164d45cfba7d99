"""Trajectories that wait on a real scheduler, with emulated work.

Scheduler, plugin, policy, event log, messages and task states are real; a quantum only
reports. ``python -m benchmarks.live.parked_tasks ADDRESS WORKERS`` is the process of the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Reschedule, Scheduler, Worker, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin

from libra import keys
from libra.cluster.settings import DASK_SETTINGS
from libra.facts import EngineJoined, EngineKindFields, QuantumFinished
from libra.policy import leaves_slot
from libra.scheduler import LibraPlugin, RunRegistration, scheduler_internals
from libra.types import Phase
from libra.worker.context import FactSender
from libra.worker.dask_worker import priority_here

RUN = "parked"
GROUP_SIZE, SLOTS = 16, 16
TOOLS = ("shell", "python", "edit", "search", "test")
MAX_QUANTA = 80
"""Quanta of the longest trajectory: forty turns, each a generation and an action."""
POLL_S = 0.005

BARE_OP = "bare-report"

_DONE: dict[str, int] = {}
_AHEAD: dict[Any, tuple[int, ...] | None] = {}
_RANKS: dict[str, tuple[int, ...]] = {}
_SENDERS: dict[Any, FactSender] = {}


@dataclass
class Stage:
    """A scheduler with trajectories; ``futures`` keep them alive."""

    scheduler: Scheduler
    client: Client
    plugin: Any  # LibraPlugin or BareLoop
    directory: Path
    futures: list[Any]

    @property
    def num_quanta(self) -> int:
        bare = isinstance(self.plugin, BareLoop)
        return self.plugin.num_quanta if bare else sum(self.plugin.runs[RUN].log.timeline.quanta.values())

    @property
    def num_waiting(self) -> int:
        if isinstance(self.plugin, BareLoop):
            return self.plugin.num_waiting
        return sum(self.plugin.trajectories.dispatcher.num_waiting(phase) for phase in Phase)


async def quantum(key: str, bare: bool, inline: bool) -> int:
    """A task whose quanta report and park; the key determines the numbers.

    ``inline``: tools run within generations, and the task keeps its slot as a real worker would.
    """
    worker = get_worker()
    while True:
        done = _DONE.get(key, 0)
        chance = random.Random(zlib.crc32(key.encode()) + done)
        length = 2 * chance.randint(4, MAX_QUANTA // 2)
        generates = inline or done % 2 == 0
        began_s = time.time()
        await asyncio.sleep(0)
        _DONE[key] = done + 1
        ends = done + 1 >= length
        following = "" if ends else str(Phase.TOOL if generates and not inline else Phase.ROLLOUT)
        stop_s = time.time()
        tokens, payload = (chance.randint(20, 400), 0) if generates else (0, chance.randint(0, 800))
        calls = inline or not generates
        tool, status = (chance.choice(TOOLS), chance.choice(("ok", "ok", "error"))) if calls else ("", "")
        rank = _RANKS.get(key) or priority_here(worker, key)
        goes_on = inline and not ends and not leaves_slot(rank, _AHEAD.get(worker.name))
        finished = QuantumFinished(
            key, Phase.ROLLOUT if generates else Phase.TOOL, tokens, tool, status, stop_s - began_s, payload, quantum=done,
            worker=str(worker.name), version=0, end="answered" if ends else "", next=following, goes_on=goes_on,
            context_tokens=300 * (done + 1), stop_s=stop_s,
        )  # fmt: skip
        if bare:
            worker.batched_send({"op": BARE_OP, "key": key, "phase": following})
        else:
            _sender(worker, inline).send(finished)
        if ends:
            return length
        if not goes_on:
            _RANKS.pop(key, None)
            raise Reschedule


def _sender(worker: Worker, inline: bool) -> FactSender:
    sender = _SENDERS.get(worker.name)
    if sender is None:
        sender = _SENDERS[worker.name] = FactSender(worker, RUN, 0)
        if inline:  # from now on the scheduler announces who waits
            slots = int(worker.state.total_resources[keys.ROLLOUT])
            sender.send(EngineJoined(str(worker.name), EngineKindFields("transformers", "", 1, slots)))
    return sender


class BareLoop(SchedulerPlugin):
    """The least that parks, releases and reports tasks: no order, no policy, no log."""

    name = "bare"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, deque[str]] = {str(phase): deque() for phase in Phase}
        self._phase: dict[str, str] = {}
        self._at: dict[str, tuple[str, str]] = {}
        self._free: Counter[tuple[str, str]] = Counter()
        self._kicked = False
        self.num_quanta = 0
        scheduler.stream_handlers[BARE_OP] = self.told

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def told(self, key: str, phase: str, worker: str) -> None:
        self.num_quanta += 1
        self._phase[key] = phase

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        for phase in self._waiting:
            self._free[phase, worker] = int(scheduler.workers[worker].resources[phase])
        self._kick()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "processing" and (at := self._at.pop(key, None)) is not None:
            self._free[at] += 1
            self._kick()
            if (ts := self._scheduler.tasks.get(key)) is not None:
                scheduler_internals.park(ts)
        if finish == "no-worker":
            self._waiting[self._phase.get(key, str(Phase.ROLLOUT))].append(key)

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self._scheduler.loop.add_callback(self._dispatch)

    def _dispatch(self) -> None:
        self._kicked, releases = False, []
        for (phase, worker), count in self._free.items():
            waiting = self._waiting[phase]
            for _ in range(min(count, len(waiting))):
                key = waiting.popleft()
                self._free[phase, worker] -= 1
                self._at[key] = phase, worker
                releases.append(scheduler_internals.Release(key, {phase: 1}, worker))
        scheduler_internals.release(self._scheduler, releases, "bare")


@contextlib.asynccontextmanager
async def parked(
    directory: Path, waiting: int, *, workers: int = 0, bare: bool = False, inline: bool = False
) -> AsyncIterator[Stage]:
    """A scheduler with ``waiting`` parked trajectories, then with ``workers`` of `SLOTS` slots per
    phase.

    ``bare`` uses `BareLoop` instead of Libra's plugin. The workers are in another process, so that
    the CPU time of this thread belongs to the scheduler and a waiting client.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(dask.config.set(DASK_SETTINGS))
        scheduler = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", port=0, dashboard=False, validate=False)
        )
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        plugin: LibraPlugin | BareLoop
        if bare:
            plugin = BareLoop(scheduler)
            scheduler.add_plugin(plugin)
        else:
            await client.register_plugin(LibraPlugin())
            plugin = scheduler.plugins[LibraPlugin.name]
            sections = {
                "policy": {"name": "cmlfq"}, "environment": {"name": "parked"}, "trainer": {"prompts": 1},
                "watchdog": {"timeout_s": None},
            }  # fmt: skip
            plugin.register_run(RunRegistration(RUN, 0, str(directory), sections))
        names = [
            keys.make("trajectory", (0, i // GROUP_SIZE, i % GROUP_SIZE), epoch=0, run=RUN) for i in range(waiting)
        ]
        futures = client.map(quantum, names, bare=bare, inline=inline, key=names, resources={keys.PARK: 1}, pure=False)
        stage = Stage(scheduler, client, plugin, directory, futures)
        while stage.num_waiting < waiting:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if workers:
            await stack.enter_async_context(_workers(scheduler, workers))
        yield stage
        if isinstance(plugin, LibraPlugin):
            plugin.end_run(RUN)


@contextlib.asynccontextmanager
async def _workers(scheduler: Scheduler, count: int) -> AsyncIterator[None]:
    arguments = ("-m", "benchmarks.live.parked_tasks", scheduler.address, str(count))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=dict(os.environ))
    try:
        while len(scheduler.workers) < count:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        yield
    finally:
        process.kill()
        await process.wait()


def _heard(worker: Any, ahead: Sequence[int] | None, **extra: Any) -> None:
    from benchmarks.live.parked_tasks import _AHEAD

    _AHEAD[worker] = None if ahead is None else tuple(ahead)


def _ranked(key: str, rank: Sequence[int], **extra: Any) -> None:
    from benchmarks.live.parked_tasks import _RANKS

    _RANKS[key] = tuple(rank)


async def _serve(address: str, count: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        supply = {keys.ROLLOUT: SLOTS, keys.TOOL: SLOTS}
        for number in range(count):
            worker = Worker(address, nthreads=2 * SLOTS, name=f"worker-{number}", resources=supply, dashboard=False)
            worker.stream_handlers["libra-ahead"] = partial(_heard, worker.name)
            worker.stream_handlers["libra-rank"] = _ranked
            await stack.enter_async_context(worker)
        await asyncio.Event().wait()


def main() -> None:
    # By its own name, so that what the scheduler unpickles and what runs here share one table of finished quanta.
    from benchmarks.live import parked_tasks

    _, address, workers = sys.argv
    with dask.config.set(DASK_SETTINGS):
        asyncio.run(parked_tasks._serve(address, int(workers)))


if __name__ == "__main__":
    main()
