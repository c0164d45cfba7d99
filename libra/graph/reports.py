"""What workers tell the plugin in the scheduler, on topic ``libra``. A report arrives before its task leaves ``processing``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libra.graph.spec import RunSpec

if TYPE_CHECKING:
    from distributed import Worker

TOPIC = "libra"


def report(worker: Worker, spec: RunSpec, kind: str, /, **fields: Any) -> None:
    """Send one report; ``fields`` must be msgpack-able.

    Kinds: quantum, ended, given_back, group, published, joined, served, quarantined, step, iteration.
    """
    worker.log_event(TOPIC, {"kind": kind, "run": spec.run, "epoch": spec.epoch, **fields})
