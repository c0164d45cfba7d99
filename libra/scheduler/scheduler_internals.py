"""Everything Libra uses of the Dask scheduler that is not public API (distributed 2026.8).

If Dask changes any of this, ``tests/scheduler/test_scheduler_internals.py`` fails.

* A task whose ``resource_restrictions`` name a resource that no worker supplies waits in state
  ``no-worker``: it is *parked*.
* Setting restrictions and ``priority`` and recommending ``processing`` releases it.
* Restrictions must be restored on **every** exit from ``processing``; otherwise a result lost with
  its worker stays pinned to a dead address.
* ``suspicious`` counts worker deaths over a task's whole life; Dask never resets it.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from libra.keys import PARK, PASS_US, QUANTUM, ROLLOUT, THREADS, TP, TRAIN

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

_PARKED = {PARK: 1}
_GC_DEFAULT = (700, 10, 10)


class Release(NamedTuple):
    """A parked task to release: its resources, its worker (or any) and a quantum's number."""

    key: str
    resources: Mapping[str, float]
    address: str | None
    quantum: int | None = None


def collect_rarely() -> None:
    """Set the garbage collector's thresholds as ``dask scheduler`` does, unless already set."""
    if gc.get_threshold() == _GC_DEFAULT:
        gc.set_threshold(*(3 * count for count in _GC_DEFAULT))


def is_parked(ts: TaskState) -> bool:
    return bool(ts.resource_restrictions == _PARKED)


def park(ts: TaskState, resource: str = PARK) -> None:
    """Make the task wait for a resource that no worker supplies, when it is next scheduled."""
    ts.resource_restrictions = {resource: 1}
    ts.worker_restrictions = None


def waits_for(ts: TaskState, resource: str) -> bool:
    return bool(ts.resource_restrictions == {resource: 1})


def tell_worker(scheduler: Scheduler, address: str, message: dict[str, Any]) -> None:
    """Send a message on a worker's stream, where a plugin handles its ``op``."""
    if address in scheduler.workers:
        scheduler.worker_send(address, message)


def release(scheduler: Scheduler, releases: Iterable[Release], stimulus_id: str) -> list[str]:
    """Send parked tasks to their workers in order; returns keys that were still waiting."""
    recommendations: dict[Any, Any] = {}
    for key, resources, address, quantum in releases:
        ts = scheduler.tasks.get(key)
        if ts is None or ts.state != "no-worker":
            continue
        ts.resource_restrictions = dict(resources)
        ts.worker_restrictions = None if address is None else {address}
        if quantum is not None:
            ts.annotations = {**(ts.annotations or {}), QUANTUM: quantum}
        recommendations[key] = "processing"
    if recommendations:
        scheduler.transitions(recommendations, stimulus_id)
    return list(recommendations)


def fail(scheduler: Scheduler, key: str, error: Exception, stimulus_id: str) -> None:
    pickled: Any = pickle.dumps(error)
    scheduler.transitions(
        scheduler.transition(key, "erred", exception=pickled, cause=key, stimulus_id=stimulus_id), stimulus_id
    )


def supply(scheduler: Scheduler, resource: str) -> dict[str, int]:
    """Declared slots of ``resource`` by address, of workers that accept tasks."""
    running = scheduler.running
    return {
        address: int(count)
        for address, count in scheduler.resources.get(resource, {}).items()
        if count > 0 and (ws := scheduler.workers.get(address)) is not None and ws in running
    }


def trainers(scheduler: Scheduler) -> list[str]:
    engines = supply(scheduler, ROLLOUT)
    return sorted(worker_name(scheduler, address) for address in supply(scheduler, TRAIN) if address not in engines)


def installs(scheduler: Scheduler, plugin: str) -> bool:
    """Whether a worker that joins now sets up a WorkerPlugin of this name."""
    return plugin in scheduler.worker_plugins


async def remove_worker_plugin(scheduler: Scheduler, name: str) -> dict[str, str]:
    """Remove a WorkerPlugin from present and later workers; returns errors by worker."""
    if scheduler.worker_plugins.pop(name, None) is None:
        return {}
    answers = await scheduler.broadcast(msg={"op": "plugin-remove", "name": name}, on_error="return")
    failed = {
        address: repr(answer) if isinstance(answer, BaseException) else str(answer.get("exception_text"))
        for address, answer in answers.items()
        if isinstance(answer, BaseException) or answer.get("status") == "error"
    }
    return {worker_name(scheduler, address): what for address, what in failed.items()}


def set_supply(scheduler: Scheduler, address: str, resource: str, count: int) -> None:
    """Set a worker's slots; deleting the key instead would break its running tasks."""
    ws = scheduler.workers[address]
    ws.resources[resource] = count
    ws.used_resources.setdefault(resource, 0)
    scheduler.resources.setdefault(resource, {})[address] = count


def hold_back(scheduler: Scheduler, address: str, resources: Iterable[str]) -> dict[str, int]:
    """Remove resources from a worker in a plugin's ``add_worker``; returns its supply."""
    ws, held = scheduler.workers[address], {}
    for resource in resources:
        if resource in ws.resources:
            held[resource] = int(ws.resources.pop(resource))
            ws.used_resources.pop(resource, None)
            scheduler.resources[resource].pop(address, None)
    return held


def restore_supply(scheduler: Scheduler, address: str, held: Mapping[str, int], stimulus_id: str) -> None:
    """Undo `hold_back`, and send the tasks that waited for these resources."""
    ws = scheduler.workers.get(address)
    if ws is None or not held:
        return
    for resource, count in held.items():
        set_supply(scheduler, address, resource, count)
    if ws in scheduler.running:
        scheduler.transitions(scheduler.bulk_schedule_unrunnable_after_adding_worker(ws), stimulus_id)


def worker_name(scheduler: Scheduler, address: str) -> str:
    ws = scheduler.workers.get(address)
    return str(ws.name) if ws is not None else address


def bucket(scheduler: Scheduler, address: str) -> str:
    """Rollout capacity class of a worker by its resources TP, THREADS and PASS_US, or ""."""
    ws = scheduler.workers.get(address)
    given = {} if ws is None else {name: int(ws.resources.get(name, 0)) for name in (TP, THREADS, PASS_US)}
    return "-".join(f"{name.lower()}{count}" for name, count in given.items() if count)


def forgive(ts: TaskState | None) -> None:
    """Reset a task's count of dead workers, because it has committed a quantum since."""
    if ts is not None:
        ts.suspicious = 0


def set_priority(ts: TaskState, priority: tuple[int, ...]) -> None:
    """Set the priority of a task that is in no heap (parked, waiting, released)."""
    ts.priority = tuple(priority)


async def restart_worker(scheduler: Scheduler, address: str, stimulus_id: str) -> str:
    """Restart a worker through its nanny, or else remove it; returns Dask's outcome."""
    answers: Mapping[str, str] = await scheduler.restart_workers(
        [address], timeout=30, wait_for_workers=False, on_error="return", stimulus_id=stimulus_id
    )
    return answers.get(address, "gone")


def add_handlers(scheduler: Scheduler, handlers: Mapping[str, Any]) -> None:
    scheduler.handlers.update(handlers)
