"""Whole groups dealt to engines in turn, as synchronous systems without a scheduler do (verl): a baseline for placement.

With as many slots as trajectories everything goes to its engine at once; the engine's own queue does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from libra.facts import Fact, Prefer, SetPriority, TrajectoryParked
from libra.policy import Fifo
from libra.sim.engines import EngineSpec


class DealtGroups(Fifo):
    """First come, first served on the engine that the group was dealt to; each engine is a bucket of its own, see `apart`."""

    name: ClassVar[str] = "dealt"

    def __init__(self, buckets: Sequence[str]) -> None:
        super().__init__()
        self._buckets = tuple(buckets)
        self._dealt: dict[str, str] = {}

    def handle(self, event: Fact) -> tuple[SetPriority | Prefer, ...]:  # type: ignore[override]
        """Answer one event."""
        answers = super().handle(event)
        if not isinstance(event, TrajectoryParked):
            return answers
        bucket = self._dealt.setdefault(event.group, self._buckets[len(self._dealt) % len(self._buckets)])
        return (*answers, Prefer(event.key, (bucket,), "dealt with its group"))

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {**super().snapshot(), "buckets": list(self._buckets), "dealt": dict(self._dealt)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        super().restore(snapshot)
        self._buckets, self._dealt = tuple(snapshot["buckets"]), dict(snapshot["dealt"])


def apart(engines: Sequence[EngineSpec], slots: int) -> tuple[EngineSpec, ...]:
    """Engines with a bucket of their own each, and ``slots`` slots."""
    return tuple(spec._replace(bucket_name=spec.name, slots=slots) for spec in engines)
