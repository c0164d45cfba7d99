"""The context of a host's members: their worker, their run, and messages from the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Worker

from libra.cluster.key_cache import bound_key_cache
from libra.envs import Environment
from libra.events.reports import TOPIC, Report, encode
from libra.store.epochs import Epoch
from libra.store.trajectory_journal import Journal
from libra.worker.run_spec import RunSpec
from libra.worker.weight_sync import WorkerWeights


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One start of a run on one worker.

    Attributes
    ----------
    model_dir : Path
        The model on this machine.
    epoch : Epoch
        The fence: raises FencedOff once a newer start of the run has begun.
    environment : Environment
        Set up.
    """

    worker: Worker
    spec: RunSpec
    model_dir: Path
    epoch: Epoch
    environment: Environment
    journal: Journal
    weights: WorkerWeights

    @property
    def name(self) -> str:
        """Name of the worker."""
        return str(self.worker.name)

    @property
    def address(self) -> str:
        """Address of the worker."""
        return self.worker.address

    def report(self, report: Report) -> None:
        """Send a report to the scheduler."""
        bound_key_cache()  # each task of a run reports something
        send(self.worker, self.spec, report)

    def listen(self, op: str, handler: Callable[..., None]) -> None:
        """Register ``handler`` for messages ``op`` of the scheduler about this start of the run; it gets their fields.

        It runs on the worker's stream, where it may not wait, and where an exception would close the worker.
        """
        listeners = self.worker.stream_handlers.setdefault(op, _Listeners())
        assert isinstance(listeners, _Listeners)
        listeners.handlers[self.spec.run, self.spec.epoch] = handler

    def stop_listening(self) -> None:
        """Remove all handlers of this start of the run."""
        for listeners in self.worker.stream_handlers.values():
            if isinstance(listeners, _Listeners):
                listeners.handlers.pop((self.spec.run, self.spec.epoch), None)


def send(worker: Worker, spec: RunSpec, report: Report) -> None:
    """Send a report of a worker that has no context yet."""
    worker.log_event(TOPIC, encode(spec.run, spec.epoch, report))


class _Listeners:
    """Handlers of one ``op`` by run and epoch; a message that names no run is for all of them."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, int], Callable[..., None]] = {}

    def __call__(self, run: str | None = None, epoch: int = 0, **fields: Any) -> None:
        handlers = [*self.handlers.values()] if run is None else [self.handlers.get((run, epoch))]
        for handler in handlers:
            if handler is not None:
                handler(**fields)
