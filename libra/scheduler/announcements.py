"""What the scheduler tells rollout workers, on the stream that also brings their tasks, and what their engines tell it.

Only workers whose host has said that it is there are told anything: elsewhere an unknown message would close the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState


def announce_version(scheduler: Scheduler, state: RunState, version: int) -> None:
    """Tell every rollout worker that a version can be pulled, so that running requests need not wait for a new quantum."""
    message = {"op": "libra-version", "run": state.run, "epoch": state.epoch, "version": version}
    message |= {"digest": state.holders.digest(version)}
    for worker, address in list(state.engines.items()):
        if address in scheduler.workers:
            scheduler.worker_send(address, message | {"holders": state.holders.nearest(version, address)})
        else:
            del state.engines[worker]
            state.served.pop(worker, None)


def tell_contention(scheduler: Scheduler, address: str, contended: bool) -> None:
    """Let a rollout worker know whether a trajectory that could go on at once must park instead."""
    if address in scheduler.workers:
        scheduler.worker_send(address, {"op": "libra-contended", "contended": contended})


def published(state: RunState, msg: dict[str, Any]) -> None:
    """A version is in the registry of the worker that trains."""
    state.emit("version_published", **{name: msg[name] for name in ("version", "digest", "num_bytes")})
    if msg.get("weights") is not None:
        state.holders.offers(msg["address"], msg["weights"], trains=True)
        state.holders.has(msg["address"], msg["version"], msg["digest"])


def newest_version(state: RunState, worker: str) -> dict[str, Any]:
    """The newest version as ``worker`` should fetch it; version -1 where none is published."""
    version = state.admission.version
    return {
        "version": version,
        "digest": state.holders.digest(version),
        "holders": state.holders.nearest(version, worker),
    }


def engine_reported(state: RunState, msg: dict[str, Any]) -> None:
    """An engine is there, serves a version that it has shown to hold, was found not to hold it, sleeps, or is awake again."""
    name, address = msg["name"], msg["address"]
    state.engines[name] = address
    state.holders.offers(address, msg.get("weights"))
    if msg["kind"] == "served":
        state.quarantined.discard(address)
        state.served[name] = msg["version"]
        state.holders.has(address, msg["version"])
        served = {field: msg[field] for field in ("version", "load_s", "tp", "bucket", "stats")}
        state.emit("version_served", worker=name, **served)
        state.emit("version_checked", version=msg["version"], worker=name, **msg["check"])
    elif msg["kind"] == "asleep":
        state.asleep.add(address)
    elif msg["kind"] == "awake":
        state.asleep.discard(address)
    elif msg["kind"] == "quarantined":
        state.quarantined.add(address)
        fields = ("version", "layer", "method", "gap", "tolerance", "detail", "out")
        state.emit("engine_quarantined", worker=name, **{field: msg[field] for field in fields})
