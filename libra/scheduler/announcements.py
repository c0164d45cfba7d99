"""Messages between the scheduler and rollout workers about versions, engines and contention.

They go on the stream that also carries tasks, and only to workers whose host has reported: an unknown message would close a
worker without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libra.facts import (
    EngineJoined,
    EngineQuarantined,
    EngineSlept,
    EngineWoke,
    Fact,
    Priority,
    SetPriority,
    VersionServed,
)  # fmt: skip
from libra.policy import Move
from libra.policy.liveness import Liveness
from libra.scheduler.dask_internals import tell_worker
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


def announce_version(scheduler: Scheduler, state: RunState, version: int, only: str | None = None) -> None:
    """Announce a version to every rollout worker, so that running requests need not wait for a new quantum; or ``only`` to one."""
    message = {"op": "libra-version", "run": state.run, "epoch": state.epoch, "version": version}
    message |= {"digest": state.workers.holders.digest(version)}
    for worker, address in list(state.workers.engines.items()):
        if only not in (None, worker):
            continue
        if address in scheduler.workers:
            scheduler.worker_send(address, message | {"holders": state.workers.holders.nearest(version, address)})
        else:
            del state.workers.engines[worker]
            state.workers.served.pop(worker, None)


def announce_ahead(scheduler: Scheduler, address: str, ahead: Priority | None) -> None:
    """Announce to a rollout worker the rank of the best waiting generation (`libra.policy.Dispatcher.ahead`)."""
    tell_worker(scheduler, address, {"op": "libra-ahead", "ahead": ahead})


def announce_rank(scheduler: Scheduler, address: str, command: SetPriority) -> None:
    """Announce to the worker that runs a trajectory its new rank."""
    tell_worker(scheduler, address, {"op": "libra-rank", "key": command.key, "rank": command.priority})


def announce_revocation(scheduler: Scheduler, state: RunState, address: str, key: str, quantum: int) -> None:
    """Have the worker that runs quantum ``quantum`` of the task ``key`` stop its action."""
    message = {"op": "libra-revoke", "run": state.run, "epoch": state.epoch, "key": key, "quantum": quantum}
    tell_worker(scheduler, address, message)


def announce_move(scheduler: Scheduler, state: RunState, worker: str, key: str, move: Move) -> None:
    """Announce to ``worker``, before the task ``key`` is sent there, that it changes its home; no effect if it has not told that
    it exchanges KV. A home that has left the cluster is not asked."""
    if worker not in state.workers.kv:
        return
    present = state.workers.engines.get(move.home) in scheduler.workers
    home = state.workers.kv.get(move.home) if move.sends and present else None
    expected = {"prefill_s": round(move.prefill_s, 9), "transfer_s": round(move.transfer_s or 0.0, 9)}
    tell_worker(scheduler, state.workers.engines.get(worker, ""), {
        "op": "libra-kv", "run": state.run, "epoch": state.epoch, "key": key, "home": home,
        "move": {"home": move.home, "worker": worker, "tokens": move.tokens, "sent": move.sends, **expected},
    })  # fmt: skip


def newest_version(state: RunState, worker: str) -> dict[str, Any]:
    """The newest version and where ``worker`` should fetch it; version -1 if none is published."""
    version = state.admission.version
    return {
        "version": version,
        "digest": state.workers.holders.digest(version),
        "holders": state.workers.holders.nearest(version, worker),
    }


def engine_told(state: RunState, liveness: Liveness, fact: Fact, address: str) -> None:
    """An engine joined, serves a checked version, failed the check, sleeps, or is awake again."""
    workers = state.workers
    match fact:
        case EngineJoined(worker=name, weights=weights, kv=kv):
            workers.engines[name] = address
            workers.holders.offers(address, weights)
            if kv is not None:
                workers.kv[name] = kv
        case VersionServed(worker=name, version=version):
            workers.engines[name] = address
            liveness.checked(state.run, address, passed=True)
            workers.served[name] = version
            workers.holders.has(address, version)
        case EngineSlept() | EngineWoke():
            liveness.slept(state.run, address, asleep=isinstance(fact, EngineSlept))
        case EngineQuarantined(version=version, layer=layer, detail=detail, out=out):
            why = f"version {version}: {layer}: {detail}" if out else ""
            liveness.checked(state.run, address, passed=False, out=why)
