"""What a worker's engine says of itself to the scheduler: at its start, when it is another one, and when its speed has changed."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from libra.policy import off_by_frac
from libra.rollout.engine_capacity import FEWEST_PASSES, KEPT_PASSES, architecture_of
from libra.rollout.vllm_settings import read_model_config
from libra.types import EngineCapacity, StepSeconds
from libra.worker.reports import report

if TYPE_CHECKING:
    from libra.worker.host import LibraHost

DECLARED_ANEW_FRAC = 0.1
"""An engine says anew how fast it is when that is off by so much of what it said last."""


class Declaring:
    """Of one host: what its engine has said so far, so that it says it again only where it has changed."""

    def __init__(self, host: LibraHost) -> None:
        self._host, self._model = host, architecture_of(read_model_config(host.model_dir))
        self._said: EngineCapacity | None = None
        self._asked_at = 0

    def tell(self, *, anew: bool = False) -> None:
        """Report what the engine holds and how fast it is, where that has changed noticeably, or ``anew``."""
        host, said = self._host, self._said
        assert host.serving is not None, "only a worker with an engine declares one"
        now = host.serving.engine.capacity()
        if said is not None and not anew and off_by_frac(now, said) <= DECLARED_ANEW_FRAC:
            return
        self._said = now
        if anew:
            self._asked_at = 0
        kind = {"engine": host.kind.engine, "bucket": host.kind.bucket, "model": self._model}
        report(host.worker, host.spec, "declared", name=str(host.worker.name), **kind, **declared_fields(now))

    def after_a_turn(self) -> None:
        """Look whether its passes show something new, where an eighth more of them ran since the last look."""
        assert self._host.serving is not None, "only a worker with an engine has turns"
        steps = self._host.serving.engine.stats().steps
        if steps >= self._asked_at:
            self._asked_at = steps + max(FEWEST_PASSES // 2, min(steps, KEPT_PASSES) // 8)
            self.tell()


def declared_fields(capacity: EngineCapacity) -> dict[str, Any]:
    """`EngineCapacity` as the flat fields of `libra.events.EngineDeclared`."""
    own = {f.name: getattr(capacity, f.name) for f in fields(capacity) if f.name != "steps"}
    if capacity.steps is not None:
        return own | asdict(capacity.steps)
    return own | {f.name: None for f in fields(StepSeconds)} | {"num_steps": 0}
