"""What the scheduler tells rollout workers, on the stream that also brings their tasks.

Only workers whose host has said that it is there are told anything: elsewhere an unknown message would close the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState


def announce_version(scheduler: Scheduler, state: RunState, version: int) -> None:
    """Tell every rollout worker that a version can be pulled, so that running requests need not wait for a new quantum."""
    message = {"op": "libra-version", "run": state.run, "epoch": state.epoch, "version": version}
    for worker, address in list(state.engines.items()):
        if address in scheduler.workers:
            scheduler.worker_send(address, message)
        else:
            del state.engines[worker]
            state.served.pop(worker, None)


def tell_contention(scheduler: Scheduler, address: str, contended: bool) -> None:
    """Let a rollout worker know whether a trajectory that could go on at once must park instead."""
    if address in scheduler.workers:
        scheduler.worker_send(address, {"op": "libra-contended", "contended": contended})
