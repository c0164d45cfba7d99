"""Hosts the services (section ``services``) of all runs on a worker.

`libra.policy.service_schedule` decides which batch runs.

Invariants
----------
1. Runs with equal definitions of a service share it under any names: the model is loaded once, and
   requests of all these runs are batched together. The service is unloaded when the last of these
   runs ends.
2. Each request is answered once or fails with `ServiceFault`, also if its batch raises or returns a
   wrong number of answers, or if its run ends. A batch that an API temporarily refuses is retried
   (`libra.envs.retries`).
3. A model answers only with verified weights (`libra.worker.services.service_models`).
4. One batch at a time runs on a GPU, among all processes of the machine
   (`libra.cluster.device_lock`). Weights are restored and evicted under the same lock, which is
   released only when the batch's threads have returned, since threads cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from distributed import Worker

from libra.cluster.device_lock import DeviceLock, Turn
from libra.cluster.hardware_inventory import gpus_here
from libra.config import resolve_model
from libra.config.service_devices import GPU_FRAC, service_workers
from libra.config.task_sections import ServiceEntry
from libra.envs.grader import bounded_reward
from libra.envs.retries import refused, with_retries
from libra.envs.tool_calls import NoThread, run_bounded
from libra.errors import ConfigError, RecordExists, ServiceFault, ServiceTimeout, ToolFault
from libra.facts import ServiceAnswered
from libra.named_parts import named_part
from libra.policy.service_schedule import Fire, ServiceFacts, ServiceSchedule
from libra.store.run_records import write_late
from libra.types import TrajectoryId
from libra.untrusted import error_text
from libra.worker.context import WorkerContext
from libra.worker.model_files import local_model
from libra.worker.services.service_functions import FUNCTIONS
from libra.worker.services.service_models import ToTeach

logger = logging.getLogger(__name__)

Outcome = tuple[Any, BaseException | None] | None
"""The value of a call or its exception; None after its time limit."""

HOST_BYTES_PER_S = 4e9
"""Speed at which weights are copied to a device, until it was measured."""
NAMED = 3
"""Trajectories that a warning names."""


class Request(NamedTuple):
    """A pending request: input, future of the answer, arrival (event-loop seconds) and run."""

    given: Any
    answer: asyncio.Future[Any]
    came_s: float
    context: WorkerContext


@dataclass(slots=True)
class Loaded:
    """A loaded service: its model in host memory (if any), copies by device, and number of runs."""

    entry: ServiceEntry
    function: Callable[..., Any]
    model: Any
    users: int = 0
    copies: dict[str, Any] = field(default_factory=dict)


class ServiceHost:
    """The services of one worker process; ``lock`` guards ``device``, and is None on CPU."""

    def __init__(self, device: Any, lock: DeviceLock | None = None) -> None:
        self._device, self._lock = device, lock
        self._schedule = ServiceSchedule({str(device): None})
        self._rooms: dict[int, int | None] = {}  # by id of the run's context
        self._loaded: dict[str, Loaded] = {}
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._batches: dict[asyncio.Task[None], str] = {}  # service of each running batch
        self._sharers = 1  # workers of a run that use the device

    def share(self, context: WorkerContext) -> None:
        """Add a run; device memory for weights is bounded by the strictest run."""
        config = context.spec.config
        self._sharers = service_workers(config)
        gib, device = config.services.device_gib, self._device
        room = None if gib is None else round(gib * 2**30)
        if room is None and device.type != "cpu":
            import torch

            taken = sum(each.model.num_bytes for each in self._loaded.values() if str(device) in each.copies)
            room = int(GPU_FRAC * (torch.cuda.mem_get_info(device)[0] + taken) / self._sharers)
        self._rooms[id(context)] = room
        self._bound()

    def leave(self, context: WorkerContext) -> None:
        del self._rooms[id(context)]
        self._bound()

    def _bound(self) -> None:
        rooms = [room for room in self._rooms.values() if room is not None]
        self._schedule.bound(str(self._device), min(rooms, default=None))

    async def load(self, entry: ServiceEntry, shown: str = "") -> str:
        """Load a service once; returns its name on this worker (``shown``: its name in the run).

        Raises ModelError, or ConfigError if the device has no room.
        """
        name = _identity(entry)
        if name not in self._loaded:
            known, model = FUNCTIONS.get(entry.function), cast("Any", None)
            function: Any = known or named_part("services.named", entry.function)
            if entry.model is not None:
                from libra.worker.services.service_models import HostModel

                directory = local_model(str(resolve_model(entry.model)))
                model = await asyncio.to_thread(HostModel, directory, labels=entry.function == "score")
                logger.info("service %s: %s in host memory, %d bytes", name, entry.model, model.num_bytes)
            num_bytes = 0 if model is None else model.num_bytes
            facts = ServiceFacts(name, entry.max_batch, entry.max_wait_s, num_bytes, num_bytes / HOST_BYTES_PER_S)
            try:
                self._schedule.declare(facts)
            except ConfigError as error:
                sharers = f". {self._sharers} tool workers share the device; type cluster.tool_workers=1 for one that has all of it"
                raise ConfigError(
                    f"{str(error).replace(name, shown or name)}{sharers if self._sharers > 1 else ''}"
                ) from error
            self._loaded[name] = Loaded(entry, function, model)
        self._loaded[name].users += 1
        return name

    async def unload(self, name: str, context: WorkerContext) -> None:
        """Fail the run's pending requests, and unload the service after its last run."""
        loaded = self._loaded[name]
        for number, request in list(self._requests.items()):
            if request.context is context and not request.answer.done():
                request.answer.set_exception(ServiceFault(f"service of {context.spec.run}: its run ends"))
                self._schedule.cancel(name, number)
        loaded.users -= 1
        if loaded.users:
            return
        await asyncio.sleep(0)  # lets a batch that has just started observe its cancellation
        running = [task for task, service in self._batches.items() if service == name]
        for task in running:
            task.cancel()  # its answers are not needed; its thread keeps the device until it returns
        await asyncio.gather(*running, return_exceptions=True)
        if not loaded.users and self._loaded.pop(name, None) is not None:
            self._schedule.withdraw(name)
            loaded.copies.clear()
            self._give_memory_back()

    async def answer(self, name: str, given: Any, context: WorkerContext) -> Any:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        request = self._requests[number] = Request(given, loop.create_future(), loop.time(), context)
        self._schedule.asked(name, number, loop.time())
        self._look()
        try:
            return await request.answer
        finally:
            self._requests.pop(number, None)
            if name in self._loaded:
                self._schedule.cancel(name, number)  # the caller no longer waits

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for fire in self._schedule.fire(loop.time()):
            task = loop.create_task(self._run(fire))
            self._batches[task] = fire.service
            task.add_done_callback(self._batches.pop)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._schedule.next_s(loop.time())
        self._timer = None if next_s is None else loop.call_at(next_s, self._look)

    async def _run(self, fire: Fire) -> None:
        loop, loaded, threads = asyncio.get_running_loop(), self._loaded[fire.service], list[asyncio.Future[None]]()
        requests = [self._requests[number] for number in fire.requests if number in self._requests]
        restore_s, failed, asked_s = 0.0, fire.restores, loop.time()
        began_s, turn = asked_s, None
        try:
            try:
                turn = await self._turn(fire, loaded)
            finally:
                began_s = loop.time()
                for other in set(fire.evicted) & self._loaded.keys():
                    self._loaded[other].copies.pop(fire.device, None)
            if fire.restores:
                loaded.copies[fire.device], restore_s = await self._restored(fire, loaded, threads)
                failed = False
            if requests:
                answers = await self._answers(fire, loaded, requests, threads)
                for request, answer in zip(requests, answers, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(answer)
        except Exception as error:  # noqa: BLE001 boundary: the service's own code, whose errors are those who asked's
            fault = error if isinstance(error, ServiceFault) else ServiceFault(f"service failed: {error_text(error)}")
            for request in requests:
                if not request.answer.done():
                    request.answer.set_exception(fault)
        finally:
            end = partial(self._ended, fire, restore_s, began_s - asked_s, failed, turn)
            if fire.device and not all(thread.done() for thread in threads):
                asyncio.gather(*threads).add_done_callback(end)
            else:
                end()
            if requests:
                self._report(fire, requests, began_s, restore_s)

    async def _turn(self, fire: Fire, loaded: Loaded) -> Turn | None:
        if not fire.device or self._lock is None:
            return None
        try:
            return await self._lock.taken(f"service {fire.service}", loaded.entry.timeout_s)
        except ToolFault as error:
            raise ServiceTimeout(str(error)) from error

    def _ended(self, fire: Fire, restore_s: float, device_s: float, failed: bool, turn: Turn | None, *_: Any) -> None:
        if turn is not None:
            if turn.others_came or self._sharers > 1:
                self._give_memory_back()
            turn.release()
        now_s = asyncio.get_running_loop().time()
        self._schedule.ended(fire, now_s, restore_s=restore_s, device_s=device_s, failed=failed)
        self._look()

    def _give_memory_back(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    async def _restored(self, fire: Fire, loaded: Loaded, threads: list[asyncio.Future[None]]) -> tuple[Any, float]:
        name, limit_s = f"service {fire.service}", loaded.entry.timeout_s
        outcome = await _in_thread(partial(loaded.model.restored, self._device), limit_s, name, threads)
        if outcome is None:
            raise ServiceTimeout(
                f"{name}: its weights were not on the device within {limit_s:g} s; type a larger timeout_s for it in services.named"
            )
        if outcome[1] is not None:
            raise ServiceFault(f"service failed: {error_text(outcome[1])}") from outcome[1]
        restored: tuple[Any, float] = outcome[0]
        return restored

    async def _answers(
        self, fire: Fire, loaded: Loaded, requests: Sequence[Request], threads: list[asyncio.Future[None]]
    ) -> Sequence[Any]:
        inputs = [request.given for request in requests]
        given = [inputs] if loaded.model is None else [loaded.copies[fire.device], loaded.model.tokenizer, inputs]
        call = partial(loaded.function, *given, **loaded.entry.args)
        name, limit_s = f"service {loaded.entry.function}", loaded.entry.timeout_s

        async def attempt() -> Outcome:
            if asyncio.iscoroutinefunction(loaded.function):
                return await run_bounded(call, {}, limit_s, is_async=True, name=name)
            return await _in_thread(call, limit_s, name, threads)

        outcome, retries = await with_retries(
            attempt,
            lambda each: refused(each[1], time.time()) if each is not None else None,
            requests[0].context.spec.back_off,
            f"{name}, request {fire.requests[0]}",
        )
        if outcome is None:
            raise ServiceTimeout(
                f"{name}: a batch of {len(inputs)} did not return within {limit_s:g} s; type a smaller max_batch or a "
                "larger timeout_s for it in services.named"
            )
        answers, error = outcome
        if error is not None:
            limited = refused(error, time.time()) is not None
            why = f"its API refuses calls for now (HTTP 429), also after {retries} retries"
            raise ServiceFault(f"{name}: {why if limited else error_text(error)}") from error
        if isinstance(answers, str | bytes | Mapping) or not hasattr(answers, "__len__") or len(answers) != len(inputs):
            raise ServiceFault(
                f"{name}: it gave {str(answers)[:60]!r} for {len(inputs)} inputs; return a list with one value for each"
            )
        return list(answers)

    def _report(self, fire: Fire, requests: Sequence[Request], began_s: float, restore_s: float) -> None:
        ran_s = max(0.0, asyncio.get_running_loop().time() - began_s - restore_s)
        for context in {id(request.context): request.context for request in requests}.values():
            own = [request for request in requests if request.context is context]
            named = context.spec.config.services.named
            name = next((name for name, entry in named.items() if _identity(entry) == fire.service), fire.service)
            waited_s = began_s - min(each.came_s for each in own)
            context.report(
                ServiceAnswered(
                    service=name, worker=context.name, requests=len(own), waited_s=round(waited_s, 6),
                    restore_s=round(restore_s, 6), ran_s=round(ran_s, 6), restored=fire.restores, evicted=len(fire.evicted),
                )
            )  # fmt: skip


async def _in_thread(
    call: Callable[[], Any], limit_s: float, name: str, threads: list[asyncio.Future[None]]
) -> Outcome:
    """Run `run_bounded` in a thread, whose return completes a future in ``threads``."""
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[None] = loop.create_future()
    threads.append(returned)

    def called() -> Any:
        try:
            return call()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the worker
                loop.call_soon_threadsafe(returned.set_result, None)

    outcome = await run_bounded(called, {}, limit_s, is_async=False, name=name)
    if outcome is not None and isinstance(outcome[1], NoThread):
        returned.set_result(None)
    return outcome


class RunServices:
    """The services of one run on this worker; implements `libra.envs.asked_services.Asker`."""

    def __init__(self, context: WorkerContext, host: ServiceHost) -> None:
        self._context, self._host = context, host
        self._here: dict[str, str] = {}
        self._later: dict[asyncio.Task[None], tuple[str, str]] = {}  # late answers: service and trajectory
        self.loop, self.pid = asyncio.get_running_loop(), os.getpid()

    @property
    def names(self) -> Collection[str]:
        return self._here.keys()

    async def open(self) -> None:
        self._host.share(self._context)
        for name, entry in self._context.spec.config.services.named.items():
            self._here[name] = await self._host.load(entry, name)

    async def close(self) -> None:
        """Unload the run's services; log the late answers that are still pending and drop them."""
        for task in self._later:
            task.cancel()
        if self._later:
            services, ids = zip(*self._later.values(), strict=True)
            named = f"{', '.join(sorted(ids)[:NAMED])}{', ...' if len(ids) > NAMED else ''}"
            logger.warning(
                "services %s: %d late rewards did not come before the run left: %s", set(services), len(ids), named
            )
        await asyncio.gather(*self._later, return_exceptions=True)
        for name in self._here.values():
            await self._host.unload(name, self._context)
        self._host.leave(self._context)

    async def answer(self, service: str, given: Any) -> Any:
        if self._context.spec.config.services.named[service].function == "teach" and not isinstance(given, ToTeach):
            raise ServiceFault(
                f"service {service!r}: it scores trajectories for distil.teacher, and answers no reward or tool; ask one with "
                "function logprob"
            )
        return await self._host.answer(self._here[service], given, self._context)

    def answer_later(self, service: str, given: Any, trajectory_id: str) -> None:
        """Deliver the service's answer later, as the trajectory's reward. Thread-safe."""
        self.loop.call_soon_threadsafe(self._begin_late, service, given, trajectory_id)

    def _begin_late(self, service: str, given: Any, trajectory_id: str) -> None:
        task = self.loop.create_task(self._deliver(service, given, trajectory_id))
        self._later[task] = service, trajectory_id
        task.add_done_callback(self._later.pop)

    async def _deliver(self, service: str, given: Any, trajectory_id: str) -> None:
        where = f"service {service!r}, late reward of {trajectory_id}"
        try:
            reward = bounded_reward(float(await self.answer(service, given)), where)
            iteration, group, sample = map(int, trajectory_id.split("-")[1:])
            trajectory = TrajectoryId(iteration, group, sample, "train")
            await asyncio.to_thread(write_late, self._context.spec.late_dir, trajectory, reward)
        except RecordExists:
            logger.info("%s: one was delivered before, and the first one counts", where)
        except Exception as error:  # noqa: BLE001 boundary: the answer is of the service's own code
            logger.warning("%s is not delivered: %s", where, error_text(error))


_HOSTS: WeakKeyDictionary[Worker, ServiceHost] = WeakKeyDictionary()


async def open_services(context: WorkerContext) -> RunServices:
    """Load a run's services on its worker."""
    from libra.tensors import compute_device  # imports torch, which a worker without services may not need

    host = _HOSTS.get(context.worker)
    if host is None:
        device = compute_device(context.spec.config.cluster.device)
        gpus = [] if device.type == "cpu" else gpus_here()
        host = _HOSTS[context.worker] = ServiceHost(device, DeviceLock(gpus[0].name) if gpus else None)
    services = RunServices(context, host)
    try:
        await services.open()
    except BaseException:
        await services.close()
        raise
    return services


def _identity(entry: ServiceEntry) -> str:
    said = json.dumps(entry.model_dump(mode="json"), sort_keys=True, default=str)
    return f"{entry.function}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}"
