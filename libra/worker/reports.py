"""What workers tell the plugin in the scheduler, on topic ``libra``. A report arrives before its task leaves ``processing``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from libra.weights import CheckVerdict
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Worker

TOPIC = "libra"


def report(worker: Worker, spec: RunSpec, kind: str, /, **fields: Any) -> None:
    """Send one report; ``fields`` must be msgpack-able.

    Kinds: quantum, ended, given_back, group, published, joined, declared, ready, not_ready, served, quarantined, asleep, awake,
    step, iteration.
    """
    worker.log_event(TOPIC, {"kind": kind, "run": spec.run, "epoch": spec.epoch, **fields})


def quarantined_fields(version: int, verdict: CheckVerdict, *, out: bool) -> dict[str, Any]:
    """Fields of a ``quarantined`` report; ``out``: the engine is not started again."""
    return {
        "version": version,
        "layer": verdict.layer,
        "method": verdict.method,
        "gap": verdict.gap if math.isfinite(verdict.gap) else None,
        "tolerance": verdict.tolerance,
        "detail": verdict.detail,
        "out": out,
    }


def served_fields(
    version: int, verdict: CheckVerdict, measured: bool, load_s: float, check_s: float, stopped_s: float
) -> dict[str, Any]:
    """Fields of a ``served`` report.

    ``measured``: whether tolerances were; ``load_s``: of the weights, or of the start of an engine; ``check_s``: of all else;
    ``stopped_s``: in which no version was served.
    """
    return {
        "version": version,
        "load_s": round(load_s, 6),
        "check": {
            "method": verdict.method,
            "gap": verdict.gap,
            "tolerance": verdict.tolerance,
            "moved_nats": verdict.moved_nats,
            "layers": verdict.num_layers,
            "changed_layers": verdict.num_changed,
            "smallest_change": verdict.smallest_change,
            "measured": measured,
            "check_s": round(check_s, 6),
            "stopped_s": round(stopped_s, 6),
        },
    }
