"""Everything Libra uses of a Dask worker that is not public API (distributed 2026.8).

``tests/worker/test_dask_worker.py`` is its contract: if Dask changes, that test fails, and only
this file has to change.

* A task that raises ``Reschedule`` has its exception and traceback pickled, unpickled and pickled
  again before the worker checks its type and discards it.
* A task's priority arrives as the scheduler's, with the number of the worker's generation appended.
* `distributed.system.MEMORY_LIMIT` is the minimum of the machine's memory, its control group's
  limit and ``ulimit``.
* A worker's supply is two dicts of its state, ``total_resources`` and ``available_resources``.
* A joining worker has status running while its plugins are set up, but sends no heartbeat: if setup
  takes longer than ``worker-ttl``, Dask considers the worker dead and restarts it, repeatedly.
* A worker is a `distributed.core.Server`: ``handlers`` answers requests of other workers by name,
  ``rpc(address)`` sends requests.
* ``Client.cancel`` and a closing worker do not stop a running coroutine; the task's state on the
  worker shows the cancellation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import distributed.worker
from distributed import Reschedule, Worker
from distributed.comm import CommClosedError
from distributed.core import Status
from distributed.system import MEMORY_LIMIT

from libra.keys import QUANTUM

_NOT_ENDED = frozenset({"waiting", "ready", "constrained", "executing", "long-running", "cancelled", "resumed"})

_JOINING: Counter[str] = Counter()
"""Number of our plugins whose setup runs on a joining worker, by its address."""

_full_message = distributed.worker.error_message


def _error_message(e: BaseException, status: str = "error") -> Any:
    if isinstance(e, Reschedule):
        return {"status": status, "exception": None, "traceback": None, "exception_text": "", "traceback_text": ""}
    return _full_message(e, status)


PEER_ERRORS = (OSError, CommClosedError, AttributeError, KeyError)
"""Errors of `ask_worker` if the other worker is gone, or does not know the request."""


def serve_worker(worker: Worker, op: str, handler: Callable[..., Any]) -> None:
    """Answer requests ``op`` of other workers with ``await handler(**fields)``."""
    worker.handlers[op] = handler


def stop_serving(worker: Worker, op: str) -> None:
    worker.handlers.pop(op, None)


async def ask_worker(worker: Worker, address: str, op: str, **fields: Any) -> Any:
    """Another worker's answer, which is never None. Raises one of `PEER_ERRORS`."""
    answer = await getattr(worker.rpc(address), op)(**fields)
    if answer is None:  # the answer to an unknown request, which the worker logs
        raise KeyError(f"{address} does not know {op}")
    return answer


def memory_bytes() -> int:
    """Memory that this machine's processes may use, by operating system and container."""
    return int(MEMORY_LIMIT)


def cheap_reschedule() -> None:
    """Make ``Reschedule`` cheap for this process's workers; idempotent."""
    distributed.worker.error_message = _error_message


@contextmanager
def heartbeat_during_setup(worker: Worker) -> Iterator[None]:
    """Send this worker's heartbeats while one of its plugins is set up."""
    heartbeat, joining = worker.periodic_callbacks["heartbeat"], _JOINING[worker.address]
    if not joining and heartbeat.is_running():  # it has already joined
        yield
        return
    if not joining:
        heartbeat.start()
    _JOINING[worker.address] += 1
    try:
        yield
    finally:
        _JOINING[worker.address] -= 1
        if not _JOINING[worker.address]:  # Dask starts it once more
            heartbeat.stop()


def still_wanted(worker: Worker, key: str) -> bool:
    """Whether the scheduler still wants this running task, and the worker accepts work."""
    ts = worker.state.tasks.get(key)
    return ts is not None and ts.state == "executing" and worker.status is Status.running


def set_supply(worker: Worker, resource: str, count: int) -> None:
    """Set this worker's number of slots; waiting tasks are not woken."""
    state = worker.state
    more = count - state.total_resources.get(resource, 0)
    state.total_resources[resource] = count
    state.available_resources[resource] = state.available_resources.get(resource, 0) + more


def takes(worker: Worker, resource: str) -> bool:
    """Whether an unfinished task on this worker holds slots of ``resource``."""
    return any(
        ts.state in _NOT_ENDED and (ts.resource_restrictions or {}).get(resource, 0) > 0
        for ts in worker.state.tasks.values()
    )


def resources_here(worker: Worker, key: str) -> dict[str, float]:
    """The resources that a running task holds."""
    ts = worker.state.tasks.get(key)
    return dict(ts.resource_restrictions or {}) if ts is not None else {}


def priority_here(worker: Worker, key: str) -> tuple[int, ...]:
    """The priority with which a running task was sent, without Dask's suffix."""
    ts = worker.state.tasks.get(key)
    return tuple(ts.priority[:3]) if ts is not None and ts.priority is not None else (0,)


def quantum_here(worker: Worker, key: str) -> int:
    """The quantum number for which a running task was sent (`libra.keys.QUANTUM`); 0 if none."""
    ts = worker.state.tasks.get(key)
    return int((ts.annotations or {}).get(QUANTUM, 0)) if ts is not None else 0
