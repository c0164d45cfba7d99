"""Messages between the scheduler and rollout workers about versions, engines and contention.

They go on the stream that also carries tasks, and only to workers whose host has reported: an unknown message would close a
worker without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from libra import events
from libra.events.reports import (
    AsleepReport,
    AwakeReport,
    EngineReport,
    JoinedReport,
    PublishedReport,
    QuarantinedReport,
    RecheckedReport,
    ServedReport,
)
from libra.policy import Move
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


def send_contention(scheduler: Scheduler, address: str, contended: bool) -> None:
    """Notify a rollout worker whether a trajectory that could continue in its slot must park instead."""
    if address in scheduler.workers:
        scheduler.worker_send(address, {"op": "libra-contended", "contended": contended})


def announce_revocation(scheduler: Scheduler, state: RunState, address: str, key: str, quantum: int) -> None:
    """Have the worker that runs quantum ``quantum`` of the task ``key`` stop its action."""
    message = {"op": "libra-revoke", "run": state.run, "epoch": state.epoch, "key": key, "quantum": quantum}
    tell_worker(scheduler, address, message)


def announce_move(scheduler: Scheduler, state: RunState, worker: str, key: str, move: Move) -> bool:
    """Announce to ``worker``, before the task ``key`` is sent there, that it changes its home; False if it has not told that it
    exchanges KV. A home that has left the cluster is not asked."""
    if worker not in state.workers.kv:
        return False
    present = state.workers.engines.get(move.home) in scheduler.workers
    home = state.workers.kv.get(move.home) if move.sends and present else None
    tell_worker(scheduler, state.workers.engines.get(worker, ""), {
        "op": "libra-kv", "run": state.run, "epoch": state.epoch, "key": key, "home": home,
    })  # fmt: skip
    return True


def version_published(state: RunState, report: PublishedReport) -> None:
    """A version is in the registry of the worker that trains."""
    state.log.emit(events.VersionPublished, version=report.version, digest=report.digest, num_bytes=report.num_bytes)
    if report.weights is not None:
        state.workers.holders.offers(report.address, report.weights, trains=True)
        state.workers.holders.has(report.address, report.version, report.digest)


def newest_version(state: RunState, worker: str) -> dict[str, Any]:
    """The newest version and where ``worker`` should fetch it; version -1 if none is published."""
    version = state.admission.version
    return {
        "version": version,
        "digest": state.workers.holders.digest(version),
        "holders": state.workers.holders.nearest(version, worker),
    }


def engine_reported(state: RunState, report: EngineReport) -> None:
    """An engine reports: it joined, serves a checked version, failed the check, sleeps, or is awake again."""
    workers, name, address = state.workers, report.name, report.address
    workers.engines[name] = address
    match report:
        case JoinedReport(weights=weights, kv=kv):
            workers.holders.offers(address, weights)
            if kv is not None:
                workers.kv[name] = kv
        case ServedReport(version=version):
            workers.quarantined.discard(address)
            workers.out.discard(address)
            workers.served[name] = version
            workers.holders.has(address, version)
            engine: dict[str, Any] = {"tp": report.tp, "bucket": report.bucket, "stats": report.stats}
            state.log.emit(events.VersionServed, worker=name, version=version, load_s=report.load_s, **engine)
            state.log.emit(events.VersionChecked, version=version, worker=name, **asdict(report.check))
        case RecheckedReport():
            found = {key: value for key, value in asdict(report).items() if key not in ("name", "address")}
            state.log.emit(events.VersionRechecked, worker=name, **found)
        case AsleepReport():
            workers.asleep.add(address)
        case AwakeReport():
            workers.asleep.discard(address)
        case QuarantinedReport():
            workers.quarantined.add(address)
            if report.out:
                workers.out.add(address)
            fields: dict[str, Any] = {
                key: value for key, value in asdict(report).items() if key not in ("name", "address")
            }
            state.log.emit(events.EngineQuarantined, worker=name, **fields)
