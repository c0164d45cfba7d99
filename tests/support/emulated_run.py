"""A workload on a real scheduler, with engines that take the seconds of a virtual clock: a declared emulation.

Scheduler, plugin, workers, messages and task states are Dask's own, in this process. The clock moves to the next finish when
nothing is on its way any more: every trajectory waits in the scheduler, runs in an engine or a tool, or is over. A turn ends when
the request of the `VirtualEngine`, which the simulator uses too, does.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Reschedule, Scheduler, Worker, get_worker

from libra import keys
from libra.cluster.settings import DASK_SETTINGS
from libra.facts import STREAM_OP, EngineDeclared, QuantumFinished, pack, prompts_named
from libra.hardware.virtual_engine import Request, VirtualEngine
from libra.scheduler import LibraPlugin, RunRegistration
from libra.sim.simulation_options import EngineSpec, typical_context
from libra.sim.workload import Workload, prompts_of
from libra.store.event_log import read_events
from libra.types import NO_TOOL, EngineCapacity, Phase

TOOLS = "tools"


class VirtualClock:
    """Seconds that pass when `step` says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._agenda: list[tuple[float, int]] = []
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._serial = 0

    def call_at(self, at_s: float, callback: Callable[[], None]) -> int:
        self._serial += 1
        self._callbacks[self._serial] = callback
        heapq.heappush(self._agenda, (at_s, self._serial))
        return self._serial

    def cancel(self, serial: int | None) -> None:
        self._callbacks.pop(serial, None)

    def step(self) -> bool:
        """Let the next thing happen; whether there was one."""
        while self._agenda:
            at_s, serial = heapq.heappop(self._agenda)
            callback = self._callbacks.pop(serial, None)
            if callback is not None:
                self.now_s = max(self.now_s, at_s)
                callback()
                return True
        return False


class EmulatedEngine:
    """An engine whose turns take emulated seconds; it makes no tokens, only their number."""

    def __init__(
        self, spec: EngineSpec, clock: VirtualClock, group_of: Callable[[str], tuple[str, int]], context: int
    ) -> None:
        self._virtual = VirtualEngine(spec.name, spec.tables, residuals=None, rng=np.random.default_rng(0))
        self._spec, self._clock, self._group_of, self._typical_context_tokens = spec, clock, group_of, context
        self._turns: dict[str, tuple[asyncio.Future[None], int]] = {}  # with the context at its end
        self._computed: dict[str, int] = {}
        self._timer: int | None = None

    async def generate(self, key: str, context_tokens: int, new_tokens: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._turns[key] = future, context_tokens + new_tokens
        group, prompt_tokens = self._group_of(key)
        computed = self._computed.get(key, 0)
        request = Request(key, group, context_tokens, prompt_tokens, new_tokens, computed)
        self._virtual.submit(self._clock.now_s, request, (0,))
        self._arm()
        await future

    def _arm(self) -> None:
        """Wake up when the next request ends, if nothing changes until then."""
        self._clock.cancel(self._timer)
        at_s = self._virtual.next_finish_s()
        self._timer = None if at_s is None else self._clock.call_at(at_s, self._wake)

    def _wake(self) -> None:
        for done in self._virtual.finished(self._clock.now_s):
            future, self._computed[done.key] = self._turns.pop(done.key)
            future.set_result(None)
        self._arm()

    def forget(self, key: str) -> None:
        self._virtual.forget(key)
        self._computed.pop(key, None)

    def capacity(self) -> EngineCapacity:
        return self._spec.tables.capacity(self._spec.slots, self._typical_context_tokens)


async def wait_until(clock: VirtualClock, at_s: float) -> None:
    """Wait until the clock says so."""
    done = asyncio.Event()
    clock.call_at(at_s, done.set)
    await done.wait()


class Scene:
    """What the tasks of one run share; they find it in `SCENES`, for what is pickled would be copied."""

    def __init__(self, workload: Workload, specs: Sequence[EngineSpec], clock: VirtualClock) -> None:
        self.clock = clock
        self.workload = workload
        self.plans = {workload.key(plan): plan for plan in workload.trajectories}
        context = typical_context(workload.trajectories)
        self.engines = {spec.name: EmulatedEngine(spec, clock, self._group, context) for spec in specs}
        self.context = {key: plan.prompt_tokens for key, plan in self.plans.items()}
        self.quanta = dict.fromkeys(self.plans, 0)
        self.home: dict[str, str] = {}
        self.busy: set[str] = set()  # keys whose quantum waits for the clock
        self.over: set[str] = set()
        self.first_s, self.last_s = math.inf, 0.0  # when the first quantum began, and the last one ended

    def _group(self, key: str) -> tuple[str, int]:
        plan = self.plans[key]
        return self.workload.group_key(plan), plan.prompt_tokens


SCENES: dict[str, Scene] = {}


async def quantum(key: str, run: str) -> int:
    """One quantum of a trajectory on the worker where it was sent; the next one after another parking."""
    scene, worker = SCENES[run], str(get_worker().name)
    plan, done, began_s = scene.plans[key], scene.quanta[key], scene.clock.now_s
    turn = plan.turns[done // 2]
    generates = done % 2 == 0
    scene.busy.add(key)
    scene.first_s = min(scene.first_s, began_s)
    if generates:
        before = scene.home.get(key)
        if before not in (None, worker):
            scene.engines[before].forget(key)
        scene.home[key] = worker
        engine = scene.engines[worker]
        await engine.generate(key, scene.context[key], turn.new_tokens)
        scene.context[key] += turn.new_tokens
    else:
        await wait_until(scene.clock, began_s + turn.tool_s)
        scene.context[key] += turn.payload_tokens
    scene.busy.discard(key)
    scene.last_s = max(scene.last_s, scene.clock.now_s)
    scene.quanta[key] = done + 1
    ends = done + 2 >= 2 * len(plan.turns) and not (generates and turn.status)
    following = "" if ends else str(Phase.TOOL if generates else Phase.ROLLOUT)
    if ends:
        scene.engines[scene.home[key]].forget(key)
        scene.over.add(key)
    stop_s = scene.clock.now_s
    finished = QuantumFinished(
        key, Phase.ROLLOUT if generates else Phase.TOOL, turn.new_tokens if generates else 0, "" if generates else turn.tool,
        NO_TOOL if generates else str(turn.status), stop_s - began_s, 0 if generates else turn.payload_tokens, quantum=done,
        worker=worker, version=0, end="answered" if ends else "", next=following, context_tokens=scene.context[key],
        stop_s=stop_s,
    )  # fmt: skip
    get_worker().batched_send({"op": STREAM_OP, "run": run, "epoch": 0, "packed": pack([finished])})
    if not ends:
        raise Reschedule()
    return scene.quanta[key]


async def emulate(
    workload: Workload, specs: Sequence[EngineSpec], policy: dict[str, Any], directory: Path, *, tool_slots: int
) -> tuple[list[tuple[str, str, str]], float]:
    """Run ``workload`` under the plugin; its dispatches as (phase, key, worker) in order, and the makespan in emulated seconds."""
    run = workload.name
    scene = SCENES[run] = Scene(workload, specs, VirtualClock())
    async with AsyncExitStack() as stack:
        stack.enter_context(dask.config.set(DASK_SETTINGS))
        scheduler = await stack.enter_async_context(Scheduler(protocol="inproc", dashboard=False, validate=True))
        supply: dict[str, dict[str, float]] = {spec.name: {keys.ROLLOUT: spec.slots} for spec in specs}
        supply[TOOLS] = {keys.TOOL: tool_slots}
        for name, resources in supply.items():
            threads = int(sum(resources.values())) + 4
            worker = Worker(scheduler.address, nthreads=threads, name=name, resources=resources, dashboard=False)
            await stack.enter_async_context(worker)
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        await client.register_plugin(LibraPlugin())
        plugin = scheduler.plugins[LibraPlugin.name]
        scheduler.periodic_callbacks["libra-sample"].stop()  # it looks for free slots twice a second of wall time
        family = workload.trajectories[0].family
        sections = {"policy": policy, "environment": {"name": family}, "watchdog": {"timeout_s": None}}
        plugin.register_run(RunRegistration(run, 0, str(directory), {**sections, "trainer": {"prompts": 1}}))
        for spec in specs:  # as a worker's host does when its engine has started
            capacity = scene.engines[spec.name].capacity()
            declared = EngineDeclared(spec.name, "emulated", spec.bucket, "emulated", **capacity.declaration())
            plugin.told(run, 0, pack([declared]))
        if names := prompts_of(workload, workload.trajectories).groups:
            plugin.told(run, 0, pack([prompts_named("train", 0, [prompt for _, prompt in names])]))
        order = list(scene.plans)
        graph = client.map(quantum, order, run=run, key=order, resources={keys.PARK: 1}, pure=False)
        gathered = asyncio.ensure_future(client.gather(graph))
        await _live(plugin, scene, scene.clock)
        await gathered
        makespan_s = scene.last_s - scene.first_s
        plugin.end_run(run)
    del SCENES[run]
    events = plugin_events(directory)
    places = [(e["phase"], e["key"], e["worker"]) for e in events if e["name"] == "quantum_dispatched"]
    return places, makespan_s


async def _live(plugin: LibraPlugin, scene: Scene, clock: VirtualClock) -> None:
    """Let virtual time pass whenever nothing real is on its way."""
    dispatcher = plugin.trajectories.dispatcher
    while len(scene.over) < len(scene.plans):
        waiting = sum(dispatcher.num_waiting(phase) for phase in Phase)
        settled = waiting + len(scene.busy) + len(scene.over) == len(scene.plans)
        placed = sum(tracked.at is not None for tracked in plugin.trajectories.tracked.values())
        if settled and placed == len(scene.busy) and not plugin.trajectories.kicked:
            assert clock.step(), f"nothing runs, and {waiting} trajectories wait"
        await asyncio.sleep(0)


def plugin_events(directory: Path) -> list[dict[str, Any]]:
    return list(read_events(directory / "events.jsonl").events)
